//! router
fn main() {}
