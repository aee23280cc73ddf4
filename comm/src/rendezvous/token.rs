//! The job token: the secret that every rank of a job knows and that never travels.

use super::EnvironmentError;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The fewest bits a token may have.
const MIN_BITS: usize = 128;
/// As much as is read of a token's file.
const MAX_FILE: u64 = 4096;

/// A secret of 128 bits or more that ranks prove to each other without sending it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    bytes: Vec<u8>,
}

impl Token {
    /// A token from 32 or more hexadecimal digits, spaces around them aside.
    ///
    /// # Errors
    /// [`EnvironmentError::TokenNotHex`] and [`EnvironmentError::TokenShort`]; neither repeats the text.
    pub fn from_hex(text: &str) -> Result<Self, EnvironmentError> {
        let digits: Option<Vec<u8>> =
            text.trim().chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
        let digits = digits.filter(|digits| digits.len() % 2 == 0).ok_or(EnvironmentError::TokenNotHex)?;
        let bits = digits.len() * 4;
        if bits < MIN_BITS {
            return Err(EnvironmentError::TokenShort { bits });
        }
        Ok(Token { bytes: digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect() })
    }

    /// A token from a file that holds its digits and that nobody but its owner may open.
    ///
    /// # Errors
    /// [`EnvironmentError::TokenFile`] where it cannot be read, [`EnvironmentError::TokenFileMode`] where others could,
    /// and what [`from_hex`](Token::from_hex) says of its contents.
    pub fn from_file(path: &Path) -> Result<Self, EnvironmentError> {
        let unreadable = |message: String| EnvironmentError::TokenFile { path: path.to_owned(), message };
        let file = File::open(path).map_err(|error| unreadable(error.to_string()))?;
        owner_only(path, &file)?;
        let mut text = String::new();
        let read = file.take(MAX_FILE).read_to_string(&mut text);
        read.map_err(|error| unreadable(error.to_string()))?;
        Self::from_hex(&text)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Looks at the open file, not at its path, which could be another file by now.
#[cfg(unix)]
fn owner_only(path: &Path, file: &File) -> Result<(), EnvironmentError> {
    use std::os::unix::fs::PermissionsExt;
    let unreadable = |message: String| EnvironmentError::TokenFile { path: path.to_owned(), message };
    let metadata = file.metadata().map_err(|error| unreadable(error.to_string()))?;
    let mode = metadata.permissions().mode() & 0o7777;
    match metadata.is_file() {
        false => Err(unreadable("not a regular file".to_owned())),
        true if mode & !0o600 != 0 => Err(EnvironmentError::TokenFileMode { path: path.to_owned(), mode }),
        true => Ok(()),
    }
}

#[cfg(not(unix))]
fn owner_only(path: &Path, _: &File) -> Result<(), EnvironmentError> {
    let message = "who may read a file is not known on this system; use MESHSTEP_TOKEN".to_owned();
    Err(EnvironmentError::TokenFile { path: path.to_owned(), message })
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({} bits)", self.bytes.len() * 8)
    }
}
