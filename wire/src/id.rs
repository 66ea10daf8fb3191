//! Identity is an incarnation, never an address.

use std::fmt;

use bytes::Bytes;

use crate::proto;

/// Why 16 bytes could not be read as an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} has {len} bytes, expected 16")]
pub struct IdError {
    /// Which id.
    pub what: &'static str,
    /// Bytes found.
    pub len: usize,
}

macro_rules! id128 {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name([u8; 16]);

        impl $name {
            /// A fresh random id.
            pub fn random() -> Self {
                Self(rand::random())
            }
            /// From its bytes on the wire.
            pub fn from_wire(bytes: &[u8]) -> Result<Self, IdError> {
                bytes.try_into().map(Self).map_err(|_| IdError { what: $what, len: bytes.len() })
            }
            /// Its bytes on the wire.
            pub fn to_wire(self) -> Bytes {
                Bytes::copy_from_slice(&self.0)
            }
            /// Its bytes.
            pub fn as_bytes(&self) -> &[u8; 16] {
                &self.0
            }
        }
        impl From<[u8; 16]> for $name {
            fn from(bytes: [u8; 16]) -> Self {
                Self(bytes)
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", u128::from_be_bytes(self.0))
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

id128!(
    /// One process, from start to end. A restart on the same address is another boot.
    BootId,
    "boot_id"
);
id128!(
    /// One hand-off of one request; minted by the router, never used again.
    TransferId,
    "transfer_id"
);

/// One attempt of one hand-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TransferKey {
    /// The hand-off.
    pub id: TransferId,
    /// Counted by the router; a retry is a new attempt.
    pub attempt: u32,
}

impl fmt::Display for TransferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.id, self.attempt)
    }
}

impl TransferKey {
    /// The message form.
    pub fn to_wire(self) -> proto::TransferKey {
        proto::TransferKey {
            transfer_id: self.id.to_wire(),
            attempt: self.attempt,
        }
    }

    /// From the message form; an absent key reads as an empty id.
    pub fn from_wire(key: Option<&proto::TransferKey>) -> Result<Self, IdError> {
        let (bytes, attempt) = key.map_or((&[][..], 0), |k| (&k.transfer_id[..], k.attempt));
        Ok(Self {
            id: TransferId::from_wire(bytes)?,
            attempt,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_of_a_wrong_length_is_refused_by_name() {
        let error = BootId::from_wire(&[1; 15]).unwrap_err();
        assert_eq!(error.to_string(), "boot_id has 15 bytes, expected 16");
        assert!(TransferKey::from_wire(None).is_err());
    }

    #[test]
    fn a_key_survives_the_wire() {
        let key = TransferKey {
            id: TransferId::random(),
            attempt: 3,
        };
        assert_eq!(TransferKey::from_wire(Some(&key.to_wire())), Ok(key));
    }
}
