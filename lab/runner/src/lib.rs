//! vnuma-lab-runner
