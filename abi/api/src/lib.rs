//! vnuma-api
