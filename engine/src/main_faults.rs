//! `tandem-engine` with faults that a test can plant.

use std::process::ExitCode;

#[path = "main.rs"]
mod shipped;

fn main() -> ExitCode {
    shipped::main()
}
