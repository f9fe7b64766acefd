//! vnuma-lab-agent
