//! Job token: the secret of all ranks of a job, which is never sent.

use super::EnvironmentError;
use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Smallest number of bits of a token.
const MIN_BITS: usize = 128;
/// Smallest number of different bytes: of 16 random ones, fewer are seen once in a million million tokens.
const MIN_DIFFERENT: usize = 8;
/// Largest number of bytes read of a token file.
const MAX_FILE: u64 = 4096;

/// Secret of 128 bits or more. Ranks prove their knowledge of it without sending it.
#[derive(Clone)]
pub struct Token {
    bytes: Vec<u8>,
}

impl Token {
    /// Parses a token of 32 or more hexadecimal digits; surrounding whitespace is ignored.
    ///
    /// # Errors
    /// [`EnvironmentError::TokenNotHex`], [`EnvironmentError::TokenShort`] and, for zeros and other repetitions,
    /// [`EnvironmentError::TokenGuessable`]; none contains the text.
    pub fn from_hex(text: &str) -> Result<Self, EnvironmentError> {
        let digits: Option<Vec<u8>> =
            text.trim().chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
        let digits = digits.filter(|digits| digits.len() % 2 == 0).ok_or(EnvironmentError::TokenNotHex)?;
        let bits = digits.len() * 4;
        if bits < MIN_BITS {
            return Err(EnvironmentError::TokenShort { bits });
        }
        let bytes: Vec<u8> = digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect();
        let different = BTreeSet::from_iter(&bytes).len();
        if different < MIN_DIFFERENT {
            return Err(EnvironmentError::TokenGuessable { different, min: MIN_DIFFERENT });
        }
        Ok(Token { bytes })
    }

    /// Reads the token of the environment: `MESHSTEP_TOKEN`, or the file `MESHSTEP_TOKEN_FILE`; `None` if neither is set. An empty
    /// variable counts as unset.
    ///
    /// # Errors
    /// [`EnvironmentError::TwoTokens`] if both are set, and the errors of [`from_hex`](Token::from_hex) and
    /// [`from_file`](Token::from_file).
    pub fn from_env() -> Result<Option<Self>, EnvironmentError> {
        let text = |name: &str| std::env::var_os(name).map(|text| text.to_string_lossy().into_owned());
        Self::read(|name| text(name).filter(|text| !text.trim().is_empty()))
    }

    /// Reads the token from the variables that `lookup` returns if they are not empty.
    pub(super) fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, EnvironmentError> {
        match (lookup("MESHSTEP_TOKEN"), lookup("MESHSTEP_TOKEN_FILE")) {
            (Some(_), Some(_)) => Err(EnvironmentError::TwoTokens),
            (Some(text), None) => Self::from_hex(&text).map(Some),
            (None, Some(path)) => Self::from_file(Path::new(&path)).map(Some),
            (None, None) => Ok(None),
        }
    }

    /// Reads a token from a file that only its owner can access.
    ///
    /// # Errors
    /// [`EnvironmentError::TokenFile`] if it cannot be read, [`EnvironmentError::TokenFileMode`] if other users could access it,
    /// and the errors of [`from_hex`](Token::from_hex).
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

/// Compares all bytes, whatever the first ones are.
impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        let pairs = self.bytes.iter().zip(&other.bytes);
        let difference = pairs.fold(0, |difference, (a, b)| std::hint::black_box(difference | (a ^ b)));
        self.bytes.len() == other.bytes.len() && difference == 0
    }
}

impl Eq for Token {}

/// Checks the open file, not its path, which could be another file by now.
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
    let message = "file permissions cannot be checked on this system; use MESHSTEP_TOKEN".to_owned();
    Err(EnvironmentError::TokenFile { path: path.to_owned(), message })
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({} bits)", self.bytes.len() * 8)
    }
}
