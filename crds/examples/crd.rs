//! Prints the `CustomResourceDefinition`: `cargo build --release --workspace --example crd && target/release/examples/crd > charts/tandem-crds/templates/pddeployments.yaml`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    print!("{}", serde_saphyr::to_string(&tandem_crds::crd())?);
    Ok(())
}
