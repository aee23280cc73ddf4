//! Form in which a rank's result travels to the other processes: JSON, and behind it the large vectors as bytes.

use anyhow::{Context as _, Result, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::memory::Seen;

/// Result of a rank.
pub(crate) trait Portable: Serialize + DeserializeOwned + Send {
    /// Returns the large vectors, which travel apart from JSON. A copy with empty vectors returns as many.
    fn values(&mut self) -> Vec<&mut Vec<f32>>;
}

/// JSON part of a message.
#[derive(Debug, Serialize, Deserialize)]
struct Head<T> {
    result: Option<T>,
    process: Seen,
}

/// Packs the result of a rank, if it has one, and the memory of its process.
pub(super) fn pack<T: Portable>(mut result: Option<T>, process: Seen) -> Result<Vec<u8>> {
    let values: Vec<Vec<f32>> = result.iter_mut().flat_map(Portable::values).map(std::mem::take).collect();
    let head = serde_json::to_vec(&Head { result, process }).context("packing a rank's result")?;
    let mut message = (head.len() as u64).to_le_bytes().to_vec();
    message.extend(head);
    for values in values {
        message.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| message.extend(value.to_le_bytes()));
    }
    Ok(message)
}

/// Unpacks a message of [`pack`].
pub(super) fn unpack<T: Portable>(message: &[u8]) -> Result<(Option<T>, Seen)> {
    let mut rest = message;
    let len = number(&mut rest)?;
    let head = serde_json::from_slice(take(&mut rest, len)?).context("unpacking a rank's result")?;
    let Head { mut result, process } = head;
    for values in result.iter_mut().flat_map(Portable::values) {
        let len = number(&mut rest)?.checked_mul(size_of::<f32>()).context("a vector is too long")?;
        let bytes = take(&mut rest, len)?;
        *values = bytes.as_chunks().0.iter().map(|&value| f32::from_le_bytes(value)).collect();
    }
    ensure!(rest.is_empty(), "a rank's result has {} bytes too many", rest.len());
    Ok((result, process))
}

fn number(rest: &mut &[u8]) -> Result<usize> {
    let bytes = take(rest, size_of::<u64>())?;
    let word = bytes.first_chunk().copied().context("a rank's result ends early")?;
    Ok(usize::try_from(u64::from_le_bytes(word))?)
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8]> {
    let (taken, after) = rest.split_at_checked(len).context("a rank's result ends early")?;
    *rest = after;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::bits;

    #[derive(Clone, Debug, Serialize, Deserialize)]
    struct Sample {
        #[serde(with = "bits")]
        losses: Vec<f64>,
        values: Vec<(String, Vec<f32>)>,
    }

    impl Portable for Sample {
        fn values(&mut self) -> Vec<&mut Vec<f32>> {
            self.values.iter_mut().map(|(_, values)| values).collect()
        }
    }

    fn sample() -> Sample {
        let values = vec![
            ("w".to_owned(), vec![f32::from_bits(0x7fc0_1234), -0.0, f32::MIN_POSITIVE / 2.0]),
            ("empty".to_owned(), Vec::new()),
        ];
        Sample { losses: vec![f64::NAN, -0.0, f64::INFINITY, 0.1], values }
    }

    #[test]
    fn every_bit_arrives() {
        let process = Seen { before: Some(1), peak: None };
        let (back, seen) = unpack::<Sample>(&pack(Some(sample()), process).unwrap()).unwrap();
        let bits = |sample: &Sample| -> (Vec<u64>, Vec<(String, Vec<u32>)>) {
            let values = sample.values.iter();
            let values =
                values.map(|(name, values)| (name.clone(), values.iter().map(|v| v.to_bits()).collect()));
            (sample.losses.iter().map(|loss| loss.to_bits()).collect(), values.collect())
        };
        assert_eq!((bits(&back.unwrap()), seen), (bits(&sample()), process));
        assert!(unpack::<Sample>(&pack::<Sample>(None, process).unwrap()).unwrap().0.is_none());
    }

    #[test]
    fn a_message_of_another_length_is_refused() {
        let message = pack(Some(sample()), Seen::default()).unwrap();
        for len in 0..message.len() {
            assert!(unpack::<Sample>(&message[..len]).is_err(), "{len}");
        }
        assert!(unpack::<Sample>(&[&message[..], &[0]].concat()).is_err());
    }
}
