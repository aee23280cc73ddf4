//! Noise `NNpsk0` under the job token: handshake, ciphers of a connection, framing. No sockets.
//!
//! ```text
//! caller                                                       listener
//!   greeting: version, purpose, endpoint in clear; e, psk; hello  -->
//!                                       <--  reply: e, ee; the verdict
//!   confirmation: an empty message                                -->
//! ```
//!
//! The clear part of the greeting is the prologue, so a changed byte of it ends the handshake. The hello is encrypted under the
//! token alone: a listener finds a stranger before any Diffie-Hellman, and a recorded greeting can be sent again. Therefore a
//! caller is admitted with its confirmation, which is encrypted under the fresh keys of both sides.

mod cipher;
mod frame;
mod greeting;
mod handshake;

pub use cipher::{Cipher, Forged};
pub(in crate::rendezvous) use frame::{FrameError, Frames, MAX_MESSAGE, write};
pub(in crate::rendezvous) use greeting::{Alert, CallHeader, MAX_NAME, VERSION};
pub(in crate::rendezvous) use handshake::{Psk, ReadGreeting, Session, answer, greet};
