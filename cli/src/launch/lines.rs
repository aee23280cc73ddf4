//! Splits a process's output into whole lines, and into status lines, which end with a carriage return and replace each other.

/// Longest line in bytes; a longer one is cut into several.
const LONGEST: usize = 1 << 20;

/// Bytes of the line that is not complete yet.
#[derive(Debug, Default)]
pub(super) struct Lines {
    pending: Vec<u8>,
}

/// Part of the output, without its end of line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    Line(&'a [u8]),
    Status(&'a [u8]),
}

impl Lines {
    /// Adds bytes, and shows the lines that they complete, then the last status.
    pub(super) fn add(&mut self, bytes: &[u8], show: &mut impl FnMut(Piece<'_>)) {
        let mut rest = bytes;
        while let Some(at) = rest.iter().position(|&byte| byte == b'\n') {
            self.pending.extend_from_slice(&rest[..at]);
            show(Piece::Line(last_part(&self.pending)));
            self.pending.clear();
            rest = &rest[at + 1..];
        }
        self.pending.extend_from_slice(rest);
        if let Some(end) = self.pending.iter().rposition(|&byte| byte == b'\r') {
            let start = start_of_part(&self.pending[..end]);
            show(Piece::Status(&self.pending[start..end]));
            // A newline may follow the carriage return, so the status stays until more follows.
            self.pending.drain(..if end + 1 == self.pending.len() { start } else { end + 1 });
        }
        while self.pending.len() > LONGEST {
            show(Piece::Line(&self.pending[..LONGEST]));
            self.pending.drain(..LONGEST);
        }
    }

    /// Shows the last line, which has no end.
    pub(super) fn finish(self, show: &mut impl FnMut(Piece<'_>)) {
        if !self.pending.is_empty() && !self.pending.ends_with(b"\r") {
            show(Piece::Line(last_part(&self.pending)));
        }
    }
}

/// Returns the part of a line that a terminal would show: that after the last carriage return, except for one at the end.
fn last_part(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    &line[start_of_part(line)..]
}

fn start_of_part(line: &[u8]) -> usize {
    line.iter().rposition(|&byte| byte == b'\r').map_or(0, |at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the pieces as text, a status behind `~`.
    fn shown(parts: &[&str]) -> Vec<String> {
        let mut all = Vec::new();
        let mut show = |piece: Piece<'_>| {
            let (sign, bytes) = match piece {
                Piece::Line(line) => ("", line),
                Piece::Status(status) => ("~", status),
            };
            all.push(format!("{sign}{}", String::from_utf8_lossy(bytes)));
        };
        let mut lines = Lines::default();
        parts.iter().for_each(|part| lines.add(part.as_bytes(), &mut show));
        lines.finish(&mut show);
        all
    }

    #[test]
    fn lines_are_whole_however_they_arrive() {
        assert_eq!(shown(&["one\ntwo\n"]), ["one", "two"]);
        assert_eq!(shown(&["o", "n", "e\nt", "wo"]), ["one", "two"]);
        assert_eq!(shown(&["\n\n", "last"]), ["", "", "last"]);
        assert_eq!(shown(&["\n"]), [""]);
        assert_eq!(shown(&[]), [] as [&str; 0]);
    }

    #[test]
    fn a_status_is_shown_at_once_and_leaves_no_line() {
        assert_eq!(shown(&["10%\r", "20%\r30%\r", "\r"]), ["~10%", "~30%", "~"]);
        assert_eq!(shown(&["10%\r", "done\n"]), ["~10%", "done"]);
        assert_eq!(shown(&["10%\rdone\nmore"]), ["done", "more"]);
        assert_eq!(shown(&["10%\r", "do", "ne"]), ["~10%", "~10%", "done"]);
    }

    #[test]
    fn a_line_may_end_with_both_characters() {
        assert_eq!(shown(&["one\r\ntwo\r\n"]), ["one", "two"]);
        assert_eq!(shown(&["one\r", "\ntwo"]), ["~one", "one", "two"]);
    }

    #[test]
    fn a_line_without_an_end_is_cut() {
        let long = "x".repeat(LONGEST + 3);
        let all = shown(&[&long, "\n"]);
        assert_eq!(all.iter().map(String::len).collect::<Vec<_>>(), [LONGEST, 3]);
    }
}
