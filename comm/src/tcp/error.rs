//! Errors of ranks that meet over sockets.

use super::options::Encrypt;
use crate::rendezvous::{self, EnvironmentError};

/// Reason why ranks cannot meet over sockets.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The store or a listener: variables, token, port, world size, a rank that is missing or lost.
    #[error(transparent)]
    Rendezvous(#[from] rendezvous::Error),
    /// The given interface does not exist.
    #[error(
        "this machine has no interface {name:?}, it has {known:?}; set MESHSTEP_IFACE to one of them, or to an address"
    )]
    NoInterface {
        /// Name of the interface.
        name: String,
        /// Names of the existing interfaces.
        known: Vec<String>,
    },
    /// The given interface has no address that other ranks could call.
    #[error(
        "interface {name:?} has no usable address; give it one, or set MESHSTEP_IFACE to another interface or to an address"
    )]
    NoAddress {
        /// Name of the interface.
        name: String,
    },
    /// A rank runs another version of this program.
    #[error(
        "rank {rank} has version {theirs} of the streams, or sent an invalid card; start all ranks with the same program"
    )]
    OtherVersion {
        /// The rank.
        rank: usize,
        /// Its version; that of this process if only its card is invalid.
        theirs: u8,
    },
    /// Ranks have different options of encryption.
    #[error(
        "rank {rank} has encryption {theirs:?}, this rank has {mine:?}; give all ranks the same Options::encrypt"
    )]
    OtherEncryption {
        /// The rank.
        rank: usize,
        /// Its option.
        theirs: Encrypt,
        /// Option of this rank.
        mine: Encrypt,
    },
    /// The communicator could not be made.
    #[error(transparent)]
    Communicator(#[from] crate::Error),
    /// The system refused a request.
    #[error("{what} failed: {message}")]
    System {
        /// The request.
        what: &'static str,
        /// Message of the system.
        message: String,
    },
}

meshstep_tensor::debug_is_display!(Error);

impl From<EnvironmentError> for Error {
    fn from(error: EnvironmentError) -> Self {
        Error::Rendezvous(error.into())
    }
}

impl Error {
    /// Returns the error of a system's call.
    pub(super) fn system(what: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |error| Error::System { what, message: error.to_string() }
    }
}
