//! What the names in a spec are on this machine.

use std::path::PathBuf;

use tandem_crds::PDDeploymentSpec;
use tandem_secrets::{Keys, SecretFile};

use super::{UpArgs, UpError};
use crate::claims::{self, ClaimDir, ClaimError};

/// What was said of names on the command line.
#[derive(Debug)]
pub struct Names {
    claims: Vec<ClaimDir>,
    secrets: Vec<ClaimDir>,
    api_key_file: Option<PathBuf>,
    tls: Option<(PathBuf, PathBuf)>,
}

/// What a spec names; all of it can be read.
#[derive(Debug, Clone)]
pub struct Found {
    /// The model's file or folder.
    pub model: PathBuf,
    pub front: Front,
}

/// What stands between clients and the router.
#[derive(Debug, Clone, Default)]
pub struct Front {
    /// Keys of the API; none: everybody may use it.
    pub api_key_file: Option<PathBuf>,
    /// Certificate and key, where clients speak TLS.
    pub tls: Option<(PathBuf, PathBuf)>,
}

impl Names {
    pub fn of(args: &UpArgs) -> Self {
        Self {
            claims: args.claims.clone(),
            secrets: args.secrets.clone(),
            api_key_file: args.api_key_file.clone(),
            tls: args.tls_cert.clone().zip(args.tls_key.clone()),
        }
    }

    /// Looks for what a spec names.
    pub fn find(&self, spec: &PDDeploymentSpec) -> Result<Found, UpError> {
        Ok(Found {
            front: self.front(spec)?,
            model: claims::find_model(
                &spec.model,
                &self.claims,
                claims::xdg_dir("XDG_DATA_HOME", ".local/share"),
            )?,
        })
    }

    /// Whether clients need a key.
    pub fn has_keys(&self, spec: &PDDeploymentSpec) -> bool {
        self.api_key_file.is_some() || !spec.router.api_keys_secret_name.is_empty()
    }

    fn front(&self, spec: &PDDeploymentSpec) -> Result<Front, UpError> {
        let named = Some(spec.router.api_keys_secret_name.as_str()).filter(|name| !name.is_empty());
        if let (None, Some(secret)) = (named, self.secrets.first()) {
            return Err(UpError::Claim(ClaimError::UnknownSecret {
                secret: secret.claim.clone(),
                dir: secret.dir.clone(),
                expected: String::new(),
            }));
        }
        let of_secret = named
            .map(|name| claims::find_keys(name, &self.secrets, claims::xdg_dir("XDG_DATA_HOME", ".local/share")))
            .transpose()?;
        let api_key_file = self.api_key_file.clone().or(of_secret);
        if let Some(path) = &api_key_file {
            let file = SecretFile::private("--api-key-file", path);
            Keys::parse(&file, &file.read()?)?;
        }
        if let Some((cert, key)) = &self.tls {
            SecretFile::public("--tls-cert", cert).read()?;
            SecretFile::private("--tls-key", key).read()?;
        }
        Ok(Front {
            api_key_file,
            tls: self.tls.clone(),
        })
    }
}
