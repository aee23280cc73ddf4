//! Types that most programs name, for a glob import. It exports no `Error`: that of this crate is `meshstep_tensor::Error`.

pub use crate::{
    Buffer, Category, DType, Element, Layout, Meter, Param, Place, Queue, Slice, SliceMut, Threads, bf16, f16,
};
