//! Parameters and state in one safetensors file with PyTorch's names: export to PyTorch, and import from it.
//!
//! Parameters keep their own names. State has the names that `get_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict`
//! returns with `flatten_optimizer_state_dict`:
//!
//! | key | value |
//! |---|---|
//! | `<param>` | the parameter, from its f32 master if it has one |
//! | `state.<param>.step` | number of updates, a scalar of F32, or of F64 beyond 2^24; absent for SGD and Muon, as in PyTorch |
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
//! A parameter and its state are written in the widest type among parameter, master and state: nothing is lost, and PyTorch requires one
//! type. As in PyTorch, a parameter that no step has reached has no state. Settings that belong to no parameter are not in the file:
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
pub use export::export_pytorch;
pub use file::PyTorchFile;
pub use import::{Import, Imported, import_pytorch};
