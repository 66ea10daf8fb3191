//! The `tandem` program as a person runs it.

mod bench;
mod up;
