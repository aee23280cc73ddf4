//! What is wrong with the variables that a launcher sets.

use std::path::PathBuf;

/// Why the environment does not say which rank this process is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// No launcher set anything.
    #[error(
        "no launcher: neither RANK and WORLD_SIZE (torchrun) nor SLURM_PROCID and SLURM_NTASKS (srun) are set; start \
         with one of them, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
    )]
    NoLauncher,
    /// Some variables are set, but not this one.
    #[error("{variable} is not set; set it, or {instead}")]
    Missing {
        /// The variable.
        variable: &'static str,
        /// What would do as well.
        instead: &'static str,
    },
    /// A variable is not a number, or too small or too large a one.
    #[error("{variable} is {value:?}; it must be a whole number from {min} to {max}")]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// What it says.
        value: String,
        /// The smallest that it may be.
        min: u64,
        /// The largest that it may be.
        max: u64,
    },
    /// A rank that the world does not have.
    #[error("{variable} is {rank} in a world of {world_size}; ranks count from 0")]
    NoSuchRank {
        /// RANK or LOCAL_RANK.
        variable: &'static str,
        /// Which rank.
        rank: usize,
        /// Ranks in the world.
        world_size: usize,
    },
    /// A world without ranks, or with more than a store serves.
    #[error("a world of {world_size} ranks; from 1 to {max} meet in a store")]
    WorldSize {
        /// Ranks in the world.
        world_size: usize,
        /// The most there may be.
        max: usize,
    },
    /// Two launchers say different things.
    #[error(
        "{variable} is {value}, but {other} is {other_value}; unset one of them, or start with torchrun, which sets \
         TORCHELASTIC_RUN_ID and is then believed"
    )]
    Contradiction {
        /// torchrun's variable.
        variable: &'static str,
        /// What it says.
        value: u64,
        /// SLURM's variable.
        other: &'static str,
        /// What that says.
        other_value: u64,
    },
    /// There is no port after MASTER_PORT.
    #[error(
        "MASTER_PORT is 65535 and the store takes the port after it; set MESHSTEP_PORT, the same on every rank"
    )]
    NoNextPort,
    /// A list of hosts without a first one.
    #[error("SLURM_STEP_NODELIST is {list:?}, which names no host; set MASTER_ADDR to rank 0's host")]
    NoHost {
        /// What it says.
        list: String,
    },
    /// The run's name is too long to be sent.
    #[error("the run id has {len} bytes, above {max}; choose a shorter one")]
    RunIdTooLong {
        /// Its length in bytes.
        len: usize,
        /// The most it may have.
        max: usize,
    },
    /// Both ways to give a token are used.
    #[error("MESHSTEP_TOKEN and MESHSTEP_TOKEN_FILE are both set; unset one")]
    TwoTokens,
    /// The token is not what hexadecimal digits in pairs would be.
    #[error(
        "the job token is not an even number of hexadecimal digits; make one with `openssl rand -hex 32`"
    )]
    TokenNotHex,
    /// The token could be guessed.
    #[error("the job token has {bits} bits; give it 128 or more, as `openssl rand -hex 32` does")]
    TokenShort {
        /// Its length in bits.
        bits: usize,
    },
    /// The token's file cannot be read.
    #[error("no job token from {}: {message}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        message: String,
    },
    /// The token's file can be opened by others.
    #[error("{} has mode {mode:04o}; a job token's file must have 0600: `chmod 600` it", path.display())]
    TokenFileMode {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
}
