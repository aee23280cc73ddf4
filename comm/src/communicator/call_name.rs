//! Name of the call from which a thread starts operations, for errors.

use std::cell::Cell;
use std::marker::PhantomData;

thread_local!(static NAME: Cell<Option<&'static str>> = const { Cell::new(None) });

/// Guard of [`name_calls`].
#[derive(Debug)]
#[must_use = "the name holds until the guard is dropped"]
pub struct CallName {
    before: Option<&'static str>,
    /// The name belongs to this thread.
    _not_send: PhantomData<*const ()>,
}

/// Names the operations that this thread starts until the guard is dropped, for errors that list calls
/// ([`Called::by`](crate::Called::by)): the function of a library by which its caller came here. The outermost of
/// nested names counts.
///
/// ```
/// use meshstep_comm::{loopback, name_calls};
///
/// let told = loopback::spawn(2, |comm| {
///     let _name = name_calls(if comm.rank() == 0 { "train" } else { "evaluate" });
///     let mut x = meshstep_tensor::Buffer::zeroed(
///         4 + comm.rank(),
///         meshstep_tensor::DType::F32,
///         &meshstep_tensor::Meter::new(),
///         meshstep_tensor::Category::Grads,
///     )
///     .unwrap();
///     comm.all_reduce(&mut x, meshstep_comm::Reduction::Sum).unwrap_err().to_string()
/// })?;
/// assert!(told[0].contains("all_reduce(sum) of 4 f32 in train") && told[0].contains("of 5 f32 in evaluate"));
/// # Ok::<(), meshstep_comm::Error>(())
/// ```
pub fn name_calls(name: &'static str) -> CallName {
    let before = NAME.get();
    NAME.set(before.or(Some(name)));
    CallName { before, _not_send: PhantomData }
}

/// Returns the name of the operations that this thread starts now.
pub(crate) fn current() -> Option<&'static str> {
    NAME.get()
}

impl Drop for CallName {
    fn drop(&mut self) {
        NAME.set(self.before);
    }
}
