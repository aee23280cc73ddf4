//! Table of environments, with the result or the error of each.

use meshstep_comm::rendezvous::{Environment, EnvironmentError as E, Token};

const HEX: &str = "00112233445566778899aabbccddeeff";

fn read(variables: &str) -> Result<Environment, E> {
    let find = |name: &str| {
        let mut pairs = variables.split_whitespace().filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
    };
    Environment::read(find)
}

const TORCHRUN: &str = "RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 MASTER_ADDR=gpu7 MASTER_PORT=29500";
const SLURM: &str =
    "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_STEP_NODELIST=gpu[07-08] SLURM_JOB_ID=4711";

fn torchrun() -> Environment {
    Environment {
        rank: 2,
        world_size: 4,
        local_rank: 0,
        host: "gpu7".to_owned(),
        port: 29501,
        run_id: "none".to_owned(),
        restart: 0,
        token: None,
    }
}

fn slurm() -> Environment {
    Environment {
        rank: 3,
        world_size: 8,
        local_rank: 1,
        host: "gpu07".to_owned(),
        port: 24711,
        run_id: "slurm-4711.0".to_owned(),
        restart: 0,
        token: None,
    }
}

#[test]
fn launchers_variables_are_understood() {
    let elastic = || Environment { run_id: "job".to_owned(), restart: 1, ..torchrun() };
    let token = Some(Token::from_hex(HEX).unwrap());
    let table: Vec<(String, Environment)> = vec![
        (TORCHRUN.to_owned(), torchrun()),
        (format!("{TORCHRUN} TORCHELASTIC_RUN_ID=job TORCHELASTIC_RESTART_COUNT=1"), elastic()),
        (
            format!("{TORCHRUN} TORCHELASTIC_RUN_ID=job TORCHELASTIC_RESTART_COUNT=1 GROUP_WORLD_SIZE=1"),
            elastic(),
        ),
        // Each of two agents counts its own restarts.
        (
            format!("{TORCHRUN} TORCHELASTIC_RUN_ID=job TORCHELASTIC_RESTART_COUNT=1 GROUP_WORLD_SIZE=2"),
            Environment { restart: 0, ..elastic() },
        ),
        (format!("{TORCHRUN} MESHSTEP_PORT=1234"), Environment { port: 1234, ..torchrun() }),
        (format!("{TORCHRUN} MESHSTEP_TOKEN={HEX}"), Environment { token, ..torchrun() }),
        (SLURM.to_owned(), slurm()),
        (
            format!("{SLURM} SLURM_STEP_ID=2 SLURM_RESTART_COUNT=5"),
            Environment { run_id: "slurm-4711.2".to_owned(), port: 24713, restart: 5, ..slurm() },
        ),
        (
            format!("MASTER_ADDR=h MASTER_PORT=1 {SLURM}"),
            Environment { host: "h".to_owned(), port: 2, ..slurm() },
        ),
        (
            SLURM.replace("SLURM_STEP_NODELIST=gpu[07-08]", "SLURM_LAUNCH_NODE_IPADDR=10.0.0.1"),
            Environment { host: "10.0.0.1".to_owned(), ..slurm() },
        ),
        // A batch script that exports half of the variables, and duplicate variables that agree.
        (format!("WORLD_SIZE=8 RANK=3 {SLURM}"), slurm()),
        (format!("WORLD_SIZE=8 {SLURM}"), slurm()),
        // `srun torchrun`: one task per machine, several ranks.
        (format!("{TORCHRUN} {SLURM} TORCHELASTIC_RUN_ID=job TORCHELASTIC_RESTART_COUNT=1"), elastic()),
        (format!("{TORCHRUN} SLURM_PROCID="), torchrun()),
    ];
    for (variables, expected) in table {
        assert_eq!(read(&variables), Ok(expected), "{variables}");
    }
}

#[test]
fn missing_wrong_and_contradictory_variables_are_named() {
    let without = |name: &str| {
        let kept = TORCHRUN.split(' ').filter(|pair| !pair.starts_with(&format!("{name}=")));
        kept.collect::<Vec<_>>().join(" ")
    };
    let missing = |variable| E::Missing { variable, instead: "start with torchrun or srun" };
    let number =
        |variable, value: &str, min, max| E::NotANumber { variable, value: value.to_owned(), min, max };
    let u32_max = u64::from(u32::MAX);
    let table: Vec<(String, E)> = vec![
        (String::new(), E::NoLauncher),
        ("MASTER_ADDR=h MASTER_PORT=1".to_owned(), E::NoLauncher),
        ("TORCHELASTIC_RUN_ID=job SLURM_PROCID=1".to_owned(), missing("RANK")),
        (without("RANK"), missing("RANK")),
        (without("WORLD_SIZE"), missing("WORLD_SIZE")),
        (without("LOCAL_RANK"), missing("LOCAL_RANK")),
        (without("MASTER_ADDR"), missing("MASTER_ADDR")),
        (
            without("MASTER_PORT"),
            E::Missing {
                variable: "MESHSTEP_PORT",
                instead: "set MASTER_PORT, the same on every rank: the store takes the port after it",
            },
        ),
        (TORCHRUN.replace("RANK=2", "RANK=two"), number("RANK", "two", 0, u32_max)),
        (TORCHRUN.replace("RANK=2", "RANK=-1"), number("RANK", "-1", 0, u32_max)),
        (TORCHRUN.replace("SIZE=4", "SIZE=4294967296"), number("WORLD_SIZE", "4294967296", 0, u32_max)),
        (TORCHRUN.replace("29500", "0"), number("MASTER_PORT", "0", 1, 65535)),
        (TORCHRUN.replace("29500", "65536"), number("MASTER_PORT", "65536", 1, 65535)),
        (TORCHRUN.replace("29500", "65535"), E::NoNextPort),
        (format!("{TORCHRUN} MESHSTEP_PORT=x"), number("MESHSTEP_PORT", "x", 1, 65535)),
        (TORCHRUN.replace("RANK=2", "RANK=4"), E::NoSuchRank { variable: "RANK", rank: 4, world_size: 4 }),
        (
            TORCHRUN.replace("LOCAL_RANK=0", "LOCAL_RANK=4"),
            E::NoSuchRank { variable: "LOCAL_RANK", rank: 4, world_size: 4 },
        ),
        (TORCHRUN.replace("SIZE=4", "SIZE=0"), E::WorldSize { world_size: 0, max: 1024 }),
        (TORCHRUN.replace("SIZE=4", "SIZE=1025"), E::WorldSize { world_size: 1025, max: 1024 }),
        (
            format!("{TORCHRUN} {SLURM}"),
            E::Contradiction { variable: "RANK", value: 2, other: "SLURM_PROCID", other_value: 3 },
        ),
        (
            format!("WORLD_SIZE=7 {SLURM}"),
            E::Contradiction { variable: "WORLD_SIZE", value: 7, other: "SLURM_NTASKS", other_value: 8 },
        ),
        (SLURM.replace("gpu[07-08]", "gpu["), E::NoHost { list: "gpu[".to_owned() }),
        (
            format!("{TORCHRUN} TORCHELASTIC_RUN_ID={}", "x".repeat(257)),
            E::RunIdTooLong { len: 257, max: 256 },
        ),
        (format!("{TORCHRUN} MESHSTEP_TOKEN={HEX} MESHSTEP_TOKEN_FILE=f"), E::TwoTokens),
        (format!("{TORCHRUN} MESHSTEP_TOKEN={}", &HEX[2..]), E::TokenShort { bits: 120 }),
        (format!("{TORCHRUN} MESHSTEP_TOKEN={}", "0".repeat(64)), E::TokenGuessable { different: 1, min: 8 }),
        (
            format!("{TORCHRUN} MESHSTEP_TOKEN={}", "a5".repeat(32)),
            E::TokenGuessable { different: 1, min: 8 },
        ),
        (
            format!("{TORCHRUN} MESHSTEP_TOKEN={}", "01020304050607".repeat(5)),
            E::TokenGuessable { different: 7, min: 8 },
        ),
        (format!("{TORCHRUN} MESHSTEP_TOKEN=0{HEX}"), E::TokenNotHex),
        (format!("{TORCHRUN} MESHSTEP_TOKEN=x{HEX}y"), E::TokenNotHex),
    ];
    for (variables, expected) in table {
        assert_eq!(read(&variables), Err(expected), "{variables}");
    }
}

#[cfg(unix)]
#[test]
fn a_token_is_read_from_a_file_of_its_owner_alone() {
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    write(&path, format!("{HEX}\n")).unwrap();
    let token = Token::from_hex(HEX).unwrap();
    for mode in [0o600, 0o644, 0o640, 0o604, 0o602, 0o700, 0o4600] {
        set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let expected = match mode {
            0o600 => Ok(token.clone()),
            _ => Err(E::TokenFileMode { path: path.clone(), mode }),
        };
        assert_eq!(Token::from_file(&path), expected, "{mode:o}");
    }
    let from_variable = read(&format!("{TORCHRUN} MESHSTEP_TOKEN_FILE={}", path.display()));
    assert_eq!(from_variable, Err(E::TokenFileMode { path: path.clone(), mode: 0o4600 }));
    let folder_itself = Token::from_file(folder.path());
    assert!(matches!(folder_itself, Err(E::TokenFile { .. })), "{folder_itself:?}");
    let nothing = Token::from_file(&folder.path().join("no such file"));
    assert!(matches!(nothing, Err(E::TokenFile { .. })), "{nothing:?}");
}

#[test]
fn a_token_does_not_show_itself() {
    let token = Token::from_hex(HEX).unwrap();
    assert_eq!(format!("{token:?}"), "Token(128 bits)");
    let environment = read(&format!("{TORCHRUN} MESHSTEP_TOKEN={HEX}")).unwrap();
    assert!(!format!("{environment:?}").contains("0011"));
    for wrong in [&HEX[2..], "secret"] {
        let error = Token::from_hex(wrong).unwrap_err();
        assert!(!error.to_string().contains(wrong), "{error}");
    }
}
