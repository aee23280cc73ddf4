//! Encoding of values as bytes, for messages and the log. Little-endian; decoding invalid bytes returns `None`.

use std::time::Duration;

/// A value that is written to bytes and read back: little-endian, fields in order.
pub trait Wire: Sized {
    /// Appends the value to `out`.
    fn put(&self, out: &mut Vec<u8>);

    /// Takes a value off the front of `input`. Returns `None` if the bytes are not a value.
    fn take(input: &mut &[u8]) -> Option<Self>;

    /// Returns the value as bytes.
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.put(&mut out);
        out
    }

    /// Decodes a value from all of `bytes`.
    fn decode(mut bytes: &[u8]) -> Option<Self> {
        let value = Self::take(&mut bytes)?;
        bytes.is_empty().then_some(value)
    }
}

/// Implements [`Wire`] for structs and enums field by field; an enum begins with a byte for the variant.
macro_rules! wire {
    (struct $T:ident { $($field:ident),* }) => {
        impl $crate::wire::Wire for $T {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }

            fn take(input: &mut &[u8]) -> Option<Self> {
                Some($T { $($field: $crate::wire::Wire::take(input)?),* })
            }
        }
    };
    (enum $T:ident { $($tag:literal => $Variant:ident { $($field:ident),* }),* $(,)? }) => {
        impl $crate::wire::Wire for $T {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $($T::$Variant { $($field),* } => {
                        out.push($tag);
                        $($field.put(out);)*
                    })*
                }
            }

            fn take(input: &mut &[u8]) -> Option<Self> {
                let (tag, rest) = input.split_first()?;
                *input = rest;
                Some(match tag {
                    $($tag => $T::$Variant { $($field: $crate::wire::Wire::take(input)?),* },)*
                    _ => return None,
                })
            }
        }
    };
}
pub(crate) use wire;

impl Wire for u64 {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_le_bytes());
    }

    fn take(input: &mut &[u8]) -> Option<Self> {
        let (bytes, rest) = input.split_first_chunk::<8>()?;
        *input = rest;
        Some(u64::from_le_bytes(*bytes))
    }
}

impl Wire for usize {
    fn put(&self, out: &mut Vec<u8>) {
        (*self as u64).put(out);
    }

    fn take(input: &mut &[u8]) -> Option<Self> {
        u64::take(input)?.try_into().ok()
    }
}

impl Wire for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn take(input: &mut &[u8]) -> Option<Self> {
        let (byte, rest) = input.split_first()?;
        *input = rest;
        (*byte < 2).then_some(*byte == 1)
    }
}

/// Encoded in microseconds.
impl Wire for Duration {
    fn put(&self, out: &mut Vec<u8>) {
        u64::try_from(self.as_micros()).unwrap_or(u64::MAX).put(out);
    }

    fn take(input: &mut &[u8]) -> Option<Self> {
        u64::take(input).map(Duration::from_micros)
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        self.iter().for_each(|value| value.put(out));
    }

    fn take(input: &mut &[u8]) -> Option<Self> {
        if bool::take(input)? { T::take(input).map(Some) } else { Some(None) }
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.len().put(out);
        self.iter().for_each(|value| value.put(out));
    }

    fn take(input: &mut &[u8]) -> Option<Self> {
        // Every value takes at least a byte, so a wrong length causes no reads and no allocation.
        let len = usize::take(input)?;
        if len > input.len() {
            return None;
        }
        (0..len).map(|_| T::take(input)).collect()
    }
}

impl Wire for String {
    fn put(&self, out: &mut Vec<u8>) {
        self.len().put(out);
        out.extend_from_slice(self.as_bytes());
    }

    fn take(input: &mut &[u8]) -> Option<Self> {
        let len = usize::take(input)?;
        let (text, rest) = input.split_at_checked(len)?;
        *input = rest;
        String::from_utf8(text.to_vec()).ok()
    }
}
