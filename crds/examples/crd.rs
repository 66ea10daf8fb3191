//! Prints the `CustomResourceDefinition`: `cargo run --release -p tandem-crds --example crd > crds/pddeployments.yaml`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    print!("{}", serde_saphyr::to_string(&tandem_crds::crd())?);
    Ok(())
}
