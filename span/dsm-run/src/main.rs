//! Runs a program on several nodes of a user-space DSM.

mod keys;
#[cfg(test)]
mod manual;
mod network;
mod node;
mod options;
mod outcome;
mod parent;
mod programs;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments = options::Arguments::parse();
    let outcome = match arguments.node {
        Some(node) => node::run(&arguments, node),
        None => parent::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            match arguments.node {
                Some(node) => eprintln!("dsm-run: node {node}: {error:#}"),
                None => eprintln!("dsm-run: {error:#}"),
            }
            ExitCode::FAILURE
        }
    }
}
