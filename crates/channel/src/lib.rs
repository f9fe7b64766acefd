//! vnuma-channel
