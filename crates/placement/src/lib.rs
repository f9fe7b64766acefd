//! vnuma-placement
