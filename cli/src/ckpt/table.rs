//! Formats rows of text in columns.

/// Formats rows below their heads, with columns of minimum width; columns in `right` are right-aligned.
pub(super) fn aligned<const N: usize>(heads: [&str; N], right: [bool; N], rows: &[[String; N]]) -> String {
    let heads = heads.map(str::to_owned);
    let all = || std::iter::once(&heads).chain(rows);
    let widths: [usize; N] =
        std::array::from_fn(|at| all().map(|row| row[at].chars().count()).max().unwrap_or(0));
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).zip(right).map(|((cell, width), right)| match right {
            true => format!("{cell:>width$}"),
            false => format!("{cell:<width$}"),
        });
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    all().map(line).collect()
}

/// Escapes control characters in a name, which comes from a file.
pub(super) fn shown(name: &str) -> String {
    name.escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["a".to_owned(), "1,000".to_owned()], ["longer".to_owned(), "7".to_owned()]];
        let text = aligned(["name", "n"], [false, true], &rows);
        assert_eq!(text, "name        n\na       1,000\nlonger      7\n");
    }

    #[test]
    fn a_terminal_is_told_nothing() {
        assert_eq!(shown("w\u{1b}[2J\n"), "w\\u{1b}[2J\\n");
    }
}
