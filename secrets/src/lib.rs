//! Secrets in files: read bounded, compared in constant time, read again when they change, never shown.
//!
//! | module | holds |
//! | --- | --- |
//! | [`file`] | a file named by a flag: bounded, its permissions looked at |
//! | [`token`] | one secret, and how it comes in a request |
//! | [`keys`] | a list of secrets, each of which opens |
//! | [`watched`] | what was read from files, as the files are now |
//!
//! No error, log line or `Debug` holds a secret or a part of one.

pub mod file;
pub mod keys;
pub mod token;
pub mod watched;

pub use file::{SecretError, SecretFile};
pub use keys::Keys;
pub use token::{Presented, Token, bearer};
pub use watched::Watched;
