//! Errors of a launcher's variables.

use std::path::PathBuf;

/// Reason why the environment does not define this process's rank.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// No launcher has set any variable.
    #[error(
        "no launcher: neither RANK and WORLD_SIZE (torchrun) nor SLURM_PROCID and SLURM_NTASKS (srun) are set; start \
         with one of them, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
    )]
    NoLauncher,
    /// The variable is not set, although others of the launcher are.
    #[error("{variable} is not set; set it, or {instead}")]
    Missing {
        /// The variable.
        variable: &'static str,
        /// Alternative to the variable.
        instead: &'static str,
    },
    /// A variable is not a number, or is out of range.
    #[error("{variable} is {value:?}; it must be a whole number from {min} to {max}")]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// Value of the variable.
        value: String,
        /// Smallest allowed value.
        min: u64,
        /// Largest allowed value.
        max: u64,
    },
    /// The rank is not below the world size.
    #[error("{variable} is {rank} in a world of {world_size}; ranks count from 0")]
    NoSuchRank {
        /// RANK or LOCAL_RANK.
        variable: &'static str,
        /// The rank.
        rank: usize,
        /// Ranks in the world.
        world_size: usize,
    },
    /// The world has no ranks, or more than a store serves.
    #[error("the world has {world_size} ranks; a store serves 1 to {max}")]
    WorldSize {
        /// Ranks in the world.
        world_size: usize,
        /// Largest number of ranks.
        max: usize,
    },
    /// The variables of two launchers contradict each other.
    #[error(
        "{variable} is {value}, but {other} is {other_value}; unset one of them, or start with torchrun, which sets \
         TORCHELASTIC_RUN_ID and then takes precedence"
    )]
    Contradiction {
        /// torchrun's variable.
        variable: &'static str,
        /// Its value.
        value: u64,
        /// SLURM's variable.
        other: &'static str,
        /// Its value.
        other_value: u64,
    },
    /// There is no port after MASTER_PORT.
    #[error(
        "MASTER_PORT is 65535 and the store takes the port after it; set MESHSTEP_PORT, the same on every rank"
    )]
    NoNextPort,
    /// The host list has no first host.
    #[error("SLURM_STEP_NODELIST is {list:?}, which names no host; set MASTER_ADDR to rank 0's host")]
    NoHost {
        /// Value of the variable.
        list: String,
    },
    /// The run id is too long to be sent.
    #[error("the run id has {len} bytes, above the limit of {max}; choose a shorter one")]
    RunIdTooLong {
        /// Its length in bytes.
        len: usize,
        /// Limit in bytes.
        max: usize,
    },
    /// Both token variables are set.
    #[error("MESHSTEP_TOKEN and MESHSTEP_TOKEN_FILE are both set; unset one")]
    TwoTokens,
    /// The token is not an even number of hexadecimal digits.
    #[error(
        "the job token is not an even number of hexadecimal digits; make one with `openssl rand -hex 32`"
    )]
    TokenNotHex,
    /// The token is too short and could be guessed.
    #[error("the job token has {bits} bits; give it 128 or more, as `openssl rand -hex 32` does")]
    TokenShort {
        /// Its length in bits.
        bits: usize,
    },
    /// The token repeats a few bytes and could be guessed.
    #[error(
        "the job token has only {different} different bytes, below {min}; make a random one with `openssl rand -hex 32`"
    )]
    TokenGuessable {
        /// Number of different bytes.
        different: usize,
        /// Smallest number.
        min: usize,
    },
    /// The token's file cannot be read.
    #[error("cannot read a job token from {}: {message}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// Message of the system.
        message: String,
    },
    /// The token's file is accessible to other users.
    #[error("{} has mode {mode:04o}; a job token's file must have 0600: `chmod 600` it", path.display())]
    TokenFileMode {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
}

meshstep_tensor::debug_is_display!(EnvironmentError);
