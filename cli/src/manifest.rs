//! Reading a manifest file.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tandem_crds::{FieldError, Manifest, TypeMeta, Violation};

/// A manifest is small; more than this is some other file.
const MAX_BYTES: u64 = 1024 * 1024;

/// Why a manifest cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("cannot read manifest {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("manifest {} has {bytes} bytes, more than {MAX_BYTES}: it is not a manifest", path.display())]
    TooLarge { path: PathBuf, bytes: u64 },
    #[error("{}{at}: {message}", path.display())]
    Syntax { path: PathBuf, at: At, message: String },
    #[error("{}: {message}", path.display())]
    Type { path: PathBuf, message: String },
    #[error("{}: {}", path.display(), list(violations))]
    Rules { path: PathBuf, violations: Vec<Violation> },
}

/// Line and column, where the reader knows them.
#[derive(Debug, Default)]
pub struct At(Option<(u64, u64)>);

impl std::fmt::Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.map_or(Ok(()), |(line, column)| write!(f, ":{line}:{column}"))
    }
}

fn list(violations: &[Violation]) -> String {
    match violations {
        [one] => one.to_string(),
        many => {
            let lines: Vec<String> = many.iter().map(ToString::to_string).collect();
            format!("{} rules are broken:\n  {}", many.len(), lines.join("\n  "))
        }
    }
}

/// Reads the file and checks it against the types and the rules.
pub fn load(path: &Path) -> Result<Manifest, ManifestError> {
    parse(path, &text(path)?)
}

/// Reads the file as it is, and checks only that it is of our type: whoever gets it checks the rest.
pub fn object(path: &Path) -> Result<Value, ManifestError> {
    let text = text(path)?;
    typed(path, &text)?;
    serde_saphyr::from_str(&text).map_err(|error| syntax(path, None, &error))
}

fn text(path: &Path) -> Result<String, ManifestError> {
    let read = |source| ManifestError::Read {
        path: path.to_owned(),
        source,
    };
    let bytes = std::fs::metadata(path).map_err(read)?.len();
    if bytes > MAX_BYTES {
        return Err(ManifestError::TooLarge {
            path: path.to_owned(),
            bytes,
        });
    }
    std::fs::read_to_string(path).map_err(read)
}

fn syntax(path: &Path, field: Option<&str>, error: &serde_saphyr::Error) -> ManifestError {
    let error = error.without_snippet();
    let at = error.location().map(|at| (at.line(), at.column()));
    let text = error.to_string();
    let mut message = text.lines().next().unwrap_or_default();
    if let Some((line, column)) = at {
        // It stands at the front already.
        message = message.trim_end_matches(&format!(" at line {line}, column {column}"));
    }
    let message = field.map_or_else(|| message.to_owned(), |field| format!("{field}: {message}"));
    ManifestError::Syntax {
        path: path.to_owned(),
        at: At(at),
        message,
    }
}

fn typed(path: &Path, text: &str) -> Result<(), ManifestError> {
    let type_meta: TypeMeta = serde_saphyr::from_str(text).map_err(|error| syntax(path, None, &error))?;
    type_meta.check().map_err(|message| ManifestError::Type {
        path: path.to_owned(),
        message,
    })
}

fn parse(path: &Path, text: &str) -> Result<Manifest, ManifestError> {
    typed(path, text)?;
    let mut field = None;
    let object = serde_saphyr::with_deserializer_from_str(text, |deserializer| {
        Manifest::read(deserializer).map_err(|FieldError { path, source }| {
            field = Some(path);
            source
        })
    })
    .map_err(|error| syntax(path, field.as_deref(), &error))?;

    let violations = object.validate();
    if violations.is_empty() {
        Ok(object)
    } else {
        Err(ManifestError::Rules {
            path: path.to_owned(),
            violations,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../examples/smollm2.yaml");

    fn error(text: &str) -> String {
        parse(Path::new("x.yaml"), text).unwrap_err().to_string()
    }

    #[test]
    fn the_example_is_a_valid_manifest() {
        let object = parse(Path::new("x.yaml"), EXAMPLE).unwrap();
        assert_eq!(object.spec.model.source.pvc.claim_name, "models");
        assert_eq!(object.spec.model.source.pvc.path, "smollm2/model.gguf");
    }

    #[test]
    fn a_wrong_field_is_named_with_its_line_and_path() {
        let line = EXAMPLE.lines().position(|line| line.contains("policy:")).unwrap() + 1;
        let message = error(&EXAMPLE.replace("policy:", "polcy:"));
        assert!(message.starts_with(&format!("x.yaml:{line}:")), "{message}");
        assert!(message.contains("spec.router"), "{message}");
        assert!(message.contains("unknown field `polcy`"), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }

    #[test]
    fn a_value_of_the_wrong_type_is_named_with_its_line_and_path() {
        let line = EXAMPLE.lines().position(|line| line.contains("policy:")).unwrap() + 1;
        let message = error(&EXAMPLE.replace("policy: LeastLoaded", "policy: Fastest"));
        assert!(message.starts_with(&format!("x.yaml:{line}:")), "{message}");
        assert!(
            message.contains("spec.router.policy: unknown variant `Fastest`, expected one of RoundRobin, "),
            "{message}"
        );
    }

    #[test]
    fn broken_yaml_and_doubled_keys_are_refused_with_their_line() {
        assert!(
            error("apiVersion: [\n").starts_with("x.yaml:"),
            "{}",
            error("apiVersion: [\n")
        );
        let doubled = error(&EXAMPLE.replace(
            "  prefill:\n    backend: Cpu\n",
            "  prefill:\n    backend: Cpu\n    backend: Cpu\n",
        ));
        assert!(doubled.contains("backend"), "{doubled}");
    }

    #[test]
    fn another_object_and_an_empty_file_are_refused_by_kind() {
        assert!(error("apiVersion: v1\nkind: Pod\nspec: {containers: []}\n").contains("kind: \"Pod\""));
        assert!(error("").contains("PDDeployment"), "{}", error(""));
    }

    #[test]
    fn every_broken_rule_is_listed_at_once() {
        let text = EXAMPLE.replace(
            "  router:",
            "  timeouts: {stallSeconds: 70, drainSeconds: 0}\n  router:",
        );
        let message = error(&text);
        assert!(message.contains("3 rules are broken"), "{message}");
        assert!(message.contains("spec.timeouts.stallSeconds: 70"), "{message}");
        assert!(message.contains("spec.timeouts.drainSeconds: 0"), "{message}");
    }
}
