//! `tandem-engine`: serves one model as prefill, decode or both.

use std::process::ExitCode;

use clap::Parser;
use tandem_engine::serve::{flags::Flags, process};

pub(crate) fn main() -> ExitCode {
    process::run(Flags::parse())
}
