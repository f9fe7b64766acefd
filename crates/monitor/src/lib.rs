//! vnuma-monitor
