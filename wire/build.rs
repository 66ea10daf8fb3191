//! Compiles the contracts in pure Rust: no protoc is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/tandem.proto");
    let descriptors = protox::compile(["proto/tandem.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .bytes(".tandem.v1")
        .compile_fds(descriptors)?;
    Ok(())
}
