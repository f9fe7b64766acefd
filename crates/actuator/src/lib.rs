//! vnuma-actuator
