//! Compares a replay with its trace.

use std::collections::BTreeMap;
use std::fmt;

use meshstep_tensor::{DType, Slice, SliceMut, bf16, cast, f16};
use serde::Serialize;

use super::key::Key;
use super::reason::Reason;
use super::spec::Tolerance;
use super::trace::{Tensor, Trace};

/// Largest differences of one replay.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Difference {
    /// Number of compared tensors and elements.
    pub(crate) tensors: usize,
    pub(crate) values: usize,
    /// Largest `|got - want|`.
    pub(crate) absolute: Largest,
    /// Largest `|got - want| / |want|`, over elements with `want` other than 0.
    pub(crate) relative: Largest,
    /// Largest number of representable values of the tensor's type between both.
    pub(crate) ulps: Largest,
    /// Number of elements outside the tolerance, and the one furthest outside.
    pub(crate) outside: usize,
    pub(crate) worst: Option<Worst>,
}

/// Largest of some differences, and its position; no position if all are 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Largest {
    pub(crate) value: f64,
    #[serde(rename = "where")]
    pub(crate) at: Option<String>,
}

/// An element outside the tolerance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Worst {
    #[serde(rename = "where")]
    pub(crate) at: String,
    pub(crate) got: f64,
    pub(crate) want: f64,
    /// Difference divided by the allowed difference.
    pub(crate) excess: f64,
}

impl Difference {
    /// Compares every expected tensor with the replay's.
    pub(super) fn new(
        trace: &Trace,
        got: &BTreeMap<Key, Vec<f64>>,
        tolerance: Tolerance,
    ) -> Result<Self, Reason> {
        let mut difference = Difference::default();
        let scalar = if trace.params().any(|(_, p)| p.dtype == DType::F64) { DType::F64 } else { DType::F32 };
        for (key, want) in trace.expected() {
            // Scalars are stored as f64 even if the other program computed them in f32; ulps are counted in the computed
            // type.
            let dtype = if want.shape.is_empty() && is_scalar(key) { scalar } else { want.dtype };
            difference.add(key, want, got.get(key).map_or(&[], Vec::as_slice), dtype, tolerance)?;
        }
        Ok(difference)
    }

    fn add(
        &mut self,
        key: &Key,
        want: &Tensor,
        got: &[f64],
        dtype: DType,
        tolerance: Tolerance,
    ) -> Result<(), Reason> {
        let (got, want) = (rounded(got, want.dtype)?, &want.values);
        let (near_got, near_want) = (rounded(&got, dtype)?, rounded(want, dtype)?);
        let Tolerance { rtol, atol } = match key {
            Key::Evals { .. } => Tolerance { rtol: 0.0, atol: 0.0 },
            _ => tolerance,
        };
        self.tensors += 1;
        for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
            let at = || if is_scalar(key) { key.to_string() } else { format!("{key}[{i}]") };
            let distance = (got - want).abs();
            self.values += 1;
            self.absolute.raise(distance, at);
            if want != 0.0 {
                self.relative.raise(distance / want.abs(), at);
            }
            self.ulps.raise(ulps(dtype, near_got[i], near_want[i]), at);
            let allowed = atol + rtol * want.abs();
            let within = distance <= allowed; // false for NaN
            if !within {
                let excess = distance / allowed;
                self.outside += 1;
                if self.worst.as_ref().is_none_or(|worst| excess.is_nan() || excess > worst.excess) {
                    self.worst = Some(Worst { at: at(), got, want, excess });
                }
            }
        }
        Ok(())
    }
}

impl Largest {
    fn raise(&mut self, value: f64, at: impl Fn() -> String) {
        if value > self.value || value.is_nan() {
            *self = Largest { value, at: Some(at()) };
        }
    }
}

impl fmt::Display for Worst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {:e} and not {:e}", self.at, self.got, self.want)
    }
}

fn is_scalar(key: &Key) -> bool {
    matches!(key, Key::Norm { .. } | Key::Loss { .. } | Key::Evals { .. })
}

/// Rounds `values` to the type `dtype`.
fn rounded(values: &[f64], dtype: DType) -> Result<Vec<f64>, Reason> {
    super::replay::with_dtype(dtype, values, |narrow: Slice<'_>| {
        let mut wide = vec![0.0; narrow.len()];
        cast(narrow, SliceMut::from(&mut wide[..])).map(|()| wide)
    })?
    .map_err(Reason::from)
}

/// Returns the number of steps between adjacent numbers of a type from `a` to `b`, which are of this type.
fn ulps(dtype: DType, a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        return f64::NAN;
    }
    let place = |x: f64| {
        let (bits, sign): (u64, u64) = match dtype {
            DType::F32 => ((x as f32).to_bits().into(), 1 << 31),
            DType::BF16 => (bf16::from_f64(x).to_bits().into(), 1 << 15),
            DType::F16 => (f16::from_f64(x).to_bits().into(), 1 << 15),
            _ => (x.to_bits(), 1 << 63),
        };
        // Both zeros are at 0, and positions increase with the numbers.
        let magnitude = i128::from(bits & (sign - 1));
        if bits & sign == 0 { magnitude } else { -magnitude }
    };
    (place(a) - place(b)).unsigned_abs() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ulps_count_the_numbers_between() {
        for (dtype, a, b, between) in [
            (DType::F32, 1.0, 1.0 + 2f64.powi(-23), 1.0),
            (DType::F32, 1.0, 1.0 - 2f64.powi(-24), 1.0),
            (DType::F32, 0.0, -0.0, 0.0),
            (DType::F32, -f64::from(f32::from_bits(1)), f64::from(f32::from_bits(2)), 3.0),
            (DType::F64, 2.0, 2.0 + 2f64.powi(-50), 2.0),
            (DType::BF16, -1.0, -1.0 - 2f64.powi(-5), 4.0),
            (DType::F16, 1.0, 1.0 + 2f64.powi(-10), 1.0),
        ] {
            assert_eq!((ulps(dtype, a, b), ulps(dtype, b, a)), (between, between), "{dtype} {a} {b}");
        }
        assert!(ulps(DType::F32, f64::NAN, 1.0).is_nan());
    }

    #[test]
    fn the_largest_are_told_with_their_places_and_nan_is_outside() {
        let mut difference = Difference::default();
        let want = Tensor { dtype: DType::F32, shape: vec![3], values: vec![4.0, 0.0, 0.5] };
        let tolerance = Tolerance { rtol: 0.25, atol: 0.5 };
        let key = Key::Expect { t: 1, name: "w".to_owned() };
        difference.add(&key, &want, &[5.5, -0.25, 1.0], DType::F32, tolerance).unwrap();
        let at = |largest: &Largest| (largest.value, largest.at.clone().unwrap());
        assert_eq!(at(&difference.absolute), (1.5, "expect/1/w[0]".to_owned()));
        assert_eq!(at(&difference.relative), (1.0, "expect/1/w[2]".to_owned()));
        assert_eq!((difference.outside, &difference.worst), (0, &None));
        let edge = 5.5 + 2f64.powi(-21);
        let mut beyond = Difference::default();
        beyond.add(&key, &want, &[edge, 0.0, 0.5], DType::F32, tolerance).unwrap();
        assert_eq!((beyond.outside, beyond.worst.map(|worst| worst.got)), (1, Some(edge)));
        difference.add(&key, &want, &[5.5, 0.0, f64::NAN], DType::F32, tolerance).unwrap();
        assert_eq!((difference.outside, difference.tensors, difference.values), (1, 2, 6));
        assert!(difference.worst.is_some_and(|worst| worst.at == "expect/1/w[2]" && worst.got.is_nan()));
    }
}
