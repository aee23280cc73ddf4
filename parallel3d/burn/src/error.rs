//! Errors of training burn modules, with their values.

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
    /// A wrapper of the optimizer failed; the error is its own.
    #[error(transparent)]
    Wrapper(Box<dyn std::error::Error + Send + Sync>),
    /// A backward pass starts from one number.
    #[error(
        "the loss has the shape {shape:?}; a backward pass starts from one element: take the mean or the sum"
    )]
    LossShape {
        /// Shape of the loss.
        shape: Vec<usize>,
    },
    /// The loss depends on no tensor that requires a gradient.
    #[error(
        "the loss has no graph; compute it with a module on Device::autodiff() that is not its valid() form"
    )]
    NoGraph,
    /// No parameter trains.
    #[error(
        "no parameter of the module requires a gradient; create it on Device::autodiff(), or call Module::train()"
    )]
    NothingTrains,
    /// Stage 3 frees parameters between their uses, and a burn module keeps them.
    #[error(
        "stage 3 shards the parameters, but a burn module keeps each one whole on every rank; use Stage::Zero2, which shards the rest"
    )]
    WholeParameters,
    /// The optimizer's queue is on a GPU, and this build has not the feature `cuda`.
    #[error(
        "Options::queue is on {place}; enable the feature cuda of meshstep-burn, or copy tensors on the CPU: Queue::cpu()"
    )]
    QueuePlace {
        /// Place of the queue.
        place: meshstep_tensor::Place,
    },
    /// The optimizer's queue is on a GPU, and a tensor is not there.
    #[error(
        "{name:?} is on {device}, and Options::queue on {place}; move the module there, or use Queue::cpu()"
    )]
    Device {
        /// The parameter.
        name: String,
        /// Burn's device.
        device: String,
        /// Place of the queue.
        place: meshstep_tensor::Place,
    },
    /// A parameter has a type that no rule updates.
    #[error(
        "{name:?} has elements of {dtype:?}; parameters of f32, f64, bf16 and f16 are trained: cast it, or freeze it"
    )]
    DType {
        /// The parameter.
        name: String,
        /// Its type.
        dtype: burn::tensor::DType,
    },
    /// Burn could not read a tensor's values.
    #[error("burn could not read {name:?}: {reason}")]
    Read {
        /// The parameter.
        name: String,
        /// Burn's error.
        reason: String,
    },
    /// A parameter is outside of any struct, so it has no path.
    #[error("the module is a parameter alone and has no path; put it into a struct that derives Module")]
    NoPath,
    /// Two places have the same `ParamId`, but not the same shape, type and need of a gradient.
    #[error(
        "another place has the ParamId of {name:?}, but another shape, type or require_grad; give it an id of its own with Param::from_tensor, or the same values of these"
    )]
    SameId {
        /// Path of the first place.
        name: String,
    },
    /// A parameter of the module is not what the optimizer's is.
    #[error(
        "{name:?} has {dtype:?} elements in the shape {shape:?}, and the optimizer's parameter {expected} in {expected_shape:?}; pass the module of Sharded::new"
    )]
    Differs {
        /// The parameter.
        name: String,
        /// Its type.
        dtype: burn::tensor::DType,
        /// Its shape.
        shape: Vec<usize>,
        /// Type of the optimizer's parameter.
        expected: meshstep_tensor::DType,
        /// Shape of the optimizer's parameter.
        expected_shape: Vec<usize>,
    },
    /// The module lacks a parameter of the optimizer.
    #[error("the module has no parameter {name:?}, but the optimizer does; pass the module of Sharded::new")]
    NoParameter {
        /// The optimizer's parameter.
        name: String,
    },
    /// A parameter requires a gradient, but the optimizer does not have it.
    #[error(
        "{name:?} requires a gradient, but did not at Sharded::new, or was not there; freeze it, or make a new Sharded"
    )]
    NotListed {
        /// The parameter.
        name: String,
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
