//! router

pub mod text;
