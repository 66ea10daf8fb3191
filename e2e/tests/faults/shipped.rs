//! What is shipped can plant no fault.

use std::process::Command;

use tandem_e2e::bin;

/// Of the code that plants, as it lies in a binary that has it.
const MARK: &[u8] = b"is neither milliseconds nor hold";

#[test]
fn no_shipped_binary_has_faults() {
    for (shipped, planted) in [
        ("tandem-engine", "tandem-engine-faults"),
        ("tandem-router", "tandem-router-faults"),
    ] {
        let output = Command::new(bin(shipped))
            .arg("--faults=nowhere")
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{shipped}: {said}");
        assert!(said.contains("unexpected argument '--faults'"), "{shipped}: {said}");
        let marked = |name| {
            let bytes = std::fs::read(bin(name)).expect("a binary");
            bytes.windows(MARK.len()).any(|window| window == MARK)
        };
        assert!(!marked(shipped), "{shipped} holds the names of faults");
        assert!(marked(planted), "{planted} does not: the mark proves nothing");
    }
}
