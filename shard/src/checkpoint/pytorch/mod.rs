//! Parameters and state in one safetensors file, by the names PyTorch has for them: to go on there, or from there.
//!
//! Parameters have their own names, and state those that `get_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict`
//! gives with `flatten_optimizer_state_dict`:
//!
//! | key | what |
//! |---|---|
//! | `<param>` | the parameter, its f32 master where it has one |
//! | `state.<param>.step` | its updates, a scalar of F32; of more than 2^24, F64; none for SGD and Muon, as in PyTorch |
//! | `state.<param>.<slot>` | a vector of the parameter's shape |
//!
//! | rule | slots |
//! |---|---|
//! | Adam, AdamW | `exp_avg` `exp_avg_sq`, `max_exp_avg_sq` with AMSGrad |
//! | SGD with momentum, in PyTorch's form | `momentum_buffer` |
//! | RMSprop | `square_avg`, `grad_avg` if centered, `momentum_buffer` with momentum |
//! | Adagrad | `sum` |
//! | Muon | `momentum_buffer` |
//!
//! All of a parameter is in the widest type that it, its master and its state have, so nothing is lost, and PyTorch wants them
//! alike. As there, a parameter that no step has reached has no state. What belongs to no parameter does not travel:
//! hyperparameters, schedule, loss scale.
//!
//! ```text
//! tensors = safetensors.torch.load_file(path)
//! state = {key: value for key, value in tensors.items() if key.startswith("state.")}
//! model.load_state_dict({key: value for key, value in tensors.items() if key not in state})
//! options = StateDictOptions(flatten_optimizer_state_dict=True)
//! ours = get_optimizer_state_dict(model, optimizer, options=options)
//! set_optimizer_state_dict(model, optimizer, optim_state_dict=ours | state, options=options)
//! ```

mod error;
mod export;
mod file;
mod grains;
mod import;
mod keys;
mod plain;

pub use error::PyTorchError;
pub use file::PyTorchFile;
pub use import::{Import, Imported};
