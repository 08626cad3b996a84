//! Lines of cells as text in columns.

/// Which side of its column a cell stands at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Left,
    Right,
}

/// One string per line; columns are as wide as their widest cell and two spaces apart.
pub fn aligned(lines: &[Vec<String>], side: impl Fn(usize) -> Side) -> Vec<String> {
    let count = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let columns: Vec<(usize, Side)> = (0..count).map(|column| (width(column), side(column))).collect();
    let line = |cells: &Vec<String>| {
        let cells = cells.iter().zip(&columns).map(|(cell, (width, side))| match side {
            Side::Left => format!("{cell:<width$}"),
            Side::Right => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    lines.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_what_is_in_them() {
        let lines =
            [["name", "n"], ["\u{b5}s", "1000"], ["a", ""]].map(|line| line.map(str::to_owned).to_vec());
        let side = |column| if column == 0 { Side::Left } else { Side::Right };
        assert_eq!(aligned(&lines, side), ["name     n", "\u{b5}s    1000", "a"]);
    }
}
