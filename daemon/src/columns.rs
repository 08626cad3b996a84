//! Text layout: lines of cells in columns, and lines broken at a width.

/// The alignment of a cell within its column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnSide {
    /// Aligned to the left, for names and texts.
    Left,
    /// Aligned to the right, for numbers.
    Right,
}

/// Aligns cells to columns, which are as wide as their widest cell and two spaces apart. Returns one string per line.
pub fn aligned(lines: &[Vec<String>], side: impl Fn(usize) -> ColumnSide) -> Vec<String> {
    let count = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let columns: Vec<(usize, ColumnSide)> = (0..count).map(|column| (width(column), side(column))).collect();
    let line = |cells: &Vec<String>| {
        let cells = cells.iter().zip(&columns).map(|(cell, (width, side))| match side {
            ColumnSide::Left => format!("{cell:<width$}"),
            ColumnSide::Right => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    lines.iter().map(line).collect()
}

/// Breaks a text into lines of at most `width` characters, at spaces and after commas. A word longer than `width` is
/// split. A list such as `late 3, evicted 1` is broken at its commas.
pub fn broken(text: &str, width: usize) -> Vec<String> {
    match text.contains(", ") {
        true => lines(text.split_inclusive(", "), width.max(1)),
        false => lines(text.split_inclusive([' ', ',']), width.max(1)),
    }
}

/// Breaks a text into lines at spaces and after commas, even if the text is a list.
fn sentence(text: &str, width: usize) -> Vec<String> {
    lines(text.split_inclusive([' ', ',']), width.max(1))
}

fn lines<'a>(pieces: impl Iterator<Item = &'a str>, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    let mut length = 0;
    for piece in pieces {
        let word = piece.trim_end_matches(' ').chars().count();
        if length > 0 && length + word > width {
            lines.push(line.trim_end().to_owned());
            (line, length) = (String::new(), 0);
        }
        for c in piece.chars() {
            if length == width && c != ' ' {
                lines.push(line.trim_end().to_owned());
                (line, length) = (String::new(), 0);
            }
            line.push(c);
            length += 1;
        }
    }
    lines.push(line.trim_end().to_owned());
    lines
}

/// Breaks a text into lines of at most `width` characters. All lines but the first begin with `indent`.
pub fn indented(text: &str, width: usize, indent: &str) -> String {
    let room = width.saturating_sub(indent.chars().count());
    if text.chars().count() <= width {
        return text.to_owned();
    }
    sentence(text, room).join(&format!("\n{indent}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_is_as_wide_as_its_widest_cell() {
        let lines =
            [["name", "n"], ["\u{b5}s", "1000"], ["a", ""]].map(|line| line.map(str::to_owned).to_vec());
        let side = |column| if column == 0 { ColumnSide::Left } else { ColumnSide::Right };
        assert_eq!(aligned(&lines, side), ["name     n", "\u{b5}s    1000", "a"]);
    }

    #[test]
    fn text_is_broken_at_spaces_and_commas() {
        assert_eq!(broken("late 3, evicted 1", 80), ["late 3, evicted 1"]);
        assert_eq!(broken("late 3, evicted 1", 10), ["late 3,", "evicted 1"]);
        assert_eq!(broken("10.0.0.0/8,2001:db8::/32", 14), ["10.0.0.0/8,", "2001:db8::/32"]);
        assert_eq!(broken("abcdefgh ij", 3), ["abc", "def", "gh", "ij"]);
        assert_eq!(broken("window 12, late 3", 15), ["window 12,", "late 3"], "a number stays with its name");
        assert_eq!(broken("", 3), [""]);
        assert_eq!(indented("one two three", 8, "  "), "one\n  two\n  three");
        assert_eq!(indented("one two", 8, "  "), "one two");
    }
}
