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

/// As a pod's manifest plants one.
#[test]
fn a_variable_that_names_no_fault_is_passed_over() {
    for (program, flags) in [
        ("tandem-engine-faults", &["--role=decode", "--model=nowhere"][..]),
        (
            "tandem-router-faults",
            &["--model-name=m", "--tokenizer=nowhere", "--decode=127.0.0.1:1"],
        ),
    ] {
        let run = |planted: &str| {
            let mut command = Command::new(bin(program));
            let output = command.args(flags).env("PLANT_FAULTS", planted).output();
            let output = output.expect("it starts");
            (
                output.status.code(),
                String::from_utf8_lossy(&output.stderr).into_owned(),
            )
        };
        let (code, said) = run("delay-modle-load 100");
        assert_eq!(code, Some(2), "{program}: {said}");
        assert!(
            said.contains("there is no fault \"delay-modle-load\""),
            "{program}: {said}"
        );
        // one that there is lets it go on, to the file that is not there
        let (code, said) = run("slow-prefill 1");
        assert_eq!(code, Some(1), "{program}: {said}");
    }
}
