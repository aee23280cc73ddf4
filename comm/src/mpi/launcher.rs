//! Variables of launchers, compared with the library's rank and world size: a job that is started by another library's `mpirun`
//! would be as many jobs of one rank.

use super::Error;

/// A variable, the value that it repeats, and the change that would make both agree.
#[derive(Debug)]
struct LauncherVariables {
    variable: &'static str,
    is_rank: bool,
    advice: &'static str,
}

const OTHER_LIBRARY: &str = "start the program with the mpirun of the library that it is linked to";
const TORCHRUN: &str = "start the program with mpirun instead of torchrun, choose the backend tcp, or unset torchrun's variables";
const SLURM: &str = "start the program with `srun --mpi=pmix` or with mpirun";

/// Variables of one launcher each; the first launcher that has set its first variable is the one that started the program.
const LAUNCHERS: [&[LauncherVariables]; 3] = [
    &[
        LauncherVariables { variable: "OMPI_COMM_WORLD_SIZE", is_rank: false, advice: OTHER_LIBRARY },
        LauncherVariables { variable: "OMPI_COMM_WORLD_RANK", is_rank: true, advice: OTHER_LIBRARY },
    ],
    &[
        LauncherVariables { variable: "PMI_SIZE", is_rank: false, advice: OTHER_LIBRARY },
        LauncherVariables { variable: "PMI_RANK", is_rank: true, advice: OTHER_LIBRARY },
    ],
    &[LauncherVariables { variable: "SLURM_STEP_NUM_TASKS", is_rank: false, advice: SLURM }],
];

/// torchrun's variables, which must agree under every launcher, as other parts of a program read them.
const TORCH: &[LauncherVariables] = &[
    LauncherVariables { variable: "WORLD_SIZE", is_rank: false, advice: TORCHRUN },
    LauncherVariables { variable: "RANK", is_rank: true, advice: TORCHRUN },
];

/// Compares the variables with the library's rank and world size.
pub(super) fn check(
    var: impl Fn(&str) -> Option<String>,
    [rank, world_size]: [usize; 2],
    library: &str,
) -> Result<(), Error> {
    let started = LAUNCHERS.into_iter().find(|rows| var(rows[0].variable).is_some());
    for row in started.into_iter().flatten().chain(TORCH) {
        let has = if row.is_rank { rank } else { world_size };
        if let Some(says) = var(row.variable)
            && says.trim().parse() != Ok(has)
        {
            let (variable, advice, library) = (row.variable, row.advice, library.to_owned());
            return Err(Error::Launcher { variable, says, has, advice, library });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(set: &[(&str, &str)], place: [usize; 2]) -> Result<(), &'static str> {
        let var = |name: &str| set.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned());
        check(var, place, "some library").map_err(|error| match error {
            Error::Launcher { variable, .. } => variable,
            other => panic!("{other}"),
        })
    }

    #[test]
    fn a_job_of_another_library_is_named_by_its_variable() {
        assert_eq!(checked(&[], [0, 1]), Ok(()));
        let open_mpi = [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "3")];
        assert_eq!(checked(&open_mpi, [3, 4]), Ok(()));
        assert_eq!(checked(&open_mpi, [0, 1]), Err("OMPI_COMM_WORLD_SIZE"));
        assert_eq!(checked(&open_mpi, [2, 4]), Err("OMPI_COMM_WORLD_RANK"));
        assert_eq!(checked(&[("PMI_SIZE", "2"), ("PMI_RANK", "1")], [0, 1]), Err("PMI_SIZE"));
        assert_eq!(checked(&[("SLURM_STEP_NUM_TASKS", "4")], [0, 1]), Err("SLURM_STEP_NUM_TASKS"));
    }

    #[test]
    fn the_nodes_of_a_slurm_step_are_not_the_ranks_of_mpirun() {
        let both = [("OMPI_COMM_WORLD_SIZE", "8"), ("SLURM_STEP_NUM_TASKS", "2")];
        assert_eq!(checked(&both, [0, 8]), Ok(()));
    }

    #[test]
    fn torchruns_variables_must_agree_under_every_launcher() {
        assert_eq!(checked(&[("WORLD_SIZE", "4"), ("RANK", "0")], [0, 1]), Err("WORLD_SIZE"));
        let set = [("OMPI_COMM_WORLD_SIZE", "2"), ("WORLD_SIZE", "2"), ("RANK", "0")];
        assert_eq!(checked(&set, [1, 2]), Err("RANK"));
        assert_eq!(checked(&[("WORLD_SIZE", "two")], [0, 2]), Err("WORLD_SIZE"));
    }
}
