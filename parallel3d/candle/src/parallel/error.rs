//! Errors of tensors that are distributed over ranks, and their conversion to and from candle's error.

use candle_core::DType;

/// Error between ranks. Layers return candle's error with this error inside: [`cause`] finds it.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] meshstep_comm::Error),
    /// Allocation for a collective.
    #[error(transparent)]
    Memory(#[from] meshstep_tensor::Error),
    /// Dimension that does not divide among the ranks.
    #[error("dimension {dim} of shape {shape:?} does not divide among {ranks} ranks; pad it to {}", shape[*dim].next_multiple_of(*ranks))]
    Uneven {
        /// The tensor's shape.
        shape: Vec<usize>,
        /// The dimension.
        dim: usize,
        /// The ranks.
        ranks: usize,
    },
    /// Element type without collectives.
    #[error("{dtype:?} is not exchanged between ranks; f32, f64, bf16 and f16 are")]
    Unsupported {
        /// Element type.
        dtype: DType,
    },
    /// Token outside the vocabulary.
    #[error("token {token} of a vocabulary of {vocab}")]
    NoSuchToken {
        /// The token.
        token: u32,
        /// Vocabulary size over all ranks.
        vocab: usize,
    },
}

meshstep_tensor::debug_is_display!(LayerError);

impl From<LayerError> for candle_core::Error {
    fn from(error: LayerError) -> Self {
        let context = error.to_string();
        candle_core::Error::WrappedContext { wrapped: Box::new(error), context }
    }
}

/// Returns the error of this module inside a candle error, if there is one.
pub fn cause(error: &candle_core::Error) -> Option<&LayerError> {
    use candle_core::Error as E;
    match error {
        E::WrappedContext { wrapped, .. } => {
            let own = wrapped.downcast_ref::<LayerError>();
            own.or_else(|| cause(wrapped.downcast_ref::<candle_core::Error>()?))
        }
        E::Context { inner, .. } | E::WithPath { inner, .. } | E::WithBacktrace { inner, .. } => cause(inner),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Context as _;

    #[test]
    fn the_cause_is_found_below_what_candle_adds() {
        let token = LayerError::NoSuchToken { token: 9, vocab: 8 };
        let plain: candle_core::Error = token.clone().into();
        assert!(plain.to_string().contains("token 9 of a vocabulary of 8"), "{plain}");
        assert_eq!(cause(&plain), Some(&token));
        let added = plain.context("in the first layer").bt();
        assert_eq!(cause(&added), Some(&token));
        let more = Err::<(), _>(added).with_context(|| "twice").unwrap_err();
        assert_eq!(cause(&more), Some(&token));
        assert_eq!(cause(&candle_core::Error::msg("something else")), None);
    }

    #[test]
    fn an_uneven_dimension_is_told_with_what_would_work() {
        let error = LayerError::Uneven { shape: vec![2, 7], dim: 1, ranks: 4 };
        assert_eq!(
            error.to_string(),
            "dimension 1 of shape [2, 7] does not divide among 4 ranks; pad it to 8"
        );
    }
}
