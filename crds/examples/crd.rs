//! Prints the `CustomResourceDefinition`: `cargo build --release --workspace --example crd && target/release/examples/crd > crds/pddeployments.yaml`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    print!("{}", serde_saphyr::to_string(&tandem_crds::crd())?);
    Ok(())
}
