//! Errors of training with candle variables, with their values.

use candle_core::{DType, DeviceLocation};

/// Error of a [`Sharded`](crate::Sharded).
///
/// An error of construction is an error on every rank: the rank with the cause gets it, the others get
/// [`meshstep_shard::Error::Disagree`] with its text. An error of a backward pass on one rank makes the step an error on every
/// rank, [`meshstep_shard::Error::Fault`], which changes nothing.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The sharded optimizer refused a call, or a rank has failed.
    #[error(transparent)]
    Shard(#[from] meshstep_shard::Error),
    /// Candle failed in a forward or backward pass.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A backward pass starts from one number.
    #[error(
        "the loss has the shape {shape:?}; a backward pass starts from one element: take the mean or the sum"
    )]
    LossShape {
        /// Shape of the loss.
        shape: Vec<usize>,
    },
    /// A wrapper of the optimizer failed; the error is its own.
    #[error(transparent)]
    Wrapper(Box<dyn std::error::Error + Send + Sync>),
    /// Stage 3 frees parameters between their uses, and a candle variable keeps its memory.
    #[error(
        "stage 3 shards the parameters, but candle keeps each variable whole on every rank; use Stage::Zero2, which shards the rest"
    )]
    WholeVariables,
    /// The optimizer's queue is on a GPU.
    #[error("Options::queue is on {place}; variables are copied on the CPU: use Queue::cpu()")]
    QueuePlace {
        /// Place of the queue.
        place: meshstep_tensor::Place,
    },
    /// A variable or a gradient is not in the memory of the CPU.
    #[error("{name:?} is on {device:?}; only memory of the CPU is copied: create it on Device::Cpu")]
    Device {
        /// The variable.
        name: String,
        /// Its device.
        device: DeviceLocation,
    },
    /// A variable has a type that no rule updates.
    #[error(
        "{name:?} has elements of {dtype:?}; variables of f32, f64, bf16 and f16 are trained: cast it, or leave it out"
    )]
    DType {
        /// The variable.
        name: String,
        /// Its type.
        dtype: DType,
    },
    /// A variable's elements are not one run of memory.
    #[error("variable {name:?} is not contiguous; create it with Var::from_tensor(&tensor.contiguous()?)")]
    Strided {
        /// The variable.
        name: String,
    },
    /// A variable is not what its parameter is.
    #[error(
        "variable {name:?} has {dtype} elements in the shape {shape:?}, and the optimizer's parameter {expected} in {expected_shape:?}"
    )]
    Differs {
        /// The variable.
        name: String,
        /// Its type.
        dtype: meshstep_tensor::DType,
        /// Its shape.
        shape: Vec<usize>,
        /// Type of the parameter.
        expected: meshstep_tensor::DType,
        /// Shape of the parameter.
        expected_shape: Vec<usize>,
    },
    /// A variable has other values than its parameter: they were written after the last step, and the next one would overwrite them.
    #[error(
        "variable {name:?} has values that the optimizer did not write, and a step would overwrite them: write values before Sharded::new, or load a checkpoint; call refresh after a change of the optimizer's parameters"
    )]
    Written {
        /// The variable.
        name: String,
    },
    /// A parameter of the optimizer has no variable.
    #[error("the optimizer's parameter {name:?} has no variable; list one of its name")]
    NoVariable {
        /// The parameter.
        name: String,
    },
    /// One variable has two names, so it would get two updates.
    #[error("{first:?} and {second:?} are one variable; list it once")]
    SameVariable {
        /// Its first name.
        first: String,
        /// Its second name.
        second: String,
    },
}

meshstep_tensor::debug_is_display!(Error);

impl Error {
    /// Returns an error of an optimizer, or of a wrapper, as one of this type.
    pub(crate) fn of_step(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        let error: Box<dyn std::error::Error + Send + Sync> = Box::new(error);
        match error.downcast::<meshstep_shard::Error>() {
            Ok(error) => Error::Shard(*error),
            Err(error) => Error::Wrapper(error),
        }
    }
}

impl From<meshstep_tensor::Error> for Error {
    fn from(error: meshstep_tensor::Error) -> Self {
        meshstep_shard::Error::from(error).into()
    }
}
