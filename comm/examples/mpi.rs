//! Ranks of an MPI job: `mpirun -n 4 target/debug/examples/mpi`, after `cargo build -p meshstep-comm --features mpi --example mpi`.
//!
//! In a batch script of SLURM the same line works with `srun -n 4` for `mpirun -n 4`, if the MPI library was built with SLURM's PMI.

#![allow(clippy::print_stdout)] // a program

use meshstep_comm::{Communicator, Reduction, mpi};
use meshstep_tensor::{Buffer, Category, Meter};
use std::error::Error;

/// Sums the ranks over the job, and in the group of even or odd ones.
pub(crate) fn run() -> Result<String, Box<dyn Error>> {
    let comm = mpi::world(&mpi::Options::default())?.communicator();
    let rank = comm.rank();
    let sum = |comm: &dyn Communicator| -> Result<f64, Box<dyn Error>> {
        let mut buffer = Buffer::from_slice(&[rank as f64], &Meter::new(), Category::Grads)?;
        comm.all_reduce(&mut buffer, Reduction::Sum)?;
        Ok(buffer.typed::<f64>()?[0])
    };
    let group = comm.split(Some(rank as u32 % 2), 0)?.ok_or("every rank has a color")?;
    let (all, some) = (sum(&*comm)?, sum(&*group)?);
    Ok(format!("rank {rank} of {}: ranks sum to {all}, those of its group to {some}\n", comm.world_size()))
} // the last handle is dropped: the processes meet, and MPI ends

fn main() -> Result<(), Box<dyn Error>> {
    print!("{}", run()?);
    Ok(())
}
