//! Versions of functions, and the migration of a session's state from one version to another.

/// One version of a function, as read from its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionVersion {
    /// Name of the function.
    pub name: String,
    /// Name of the version in the kernel, where several versions may exist at the same time.
    pub key: String,
    /// Version of the layout of the state that the function keeps for a session.
    pub state: u32,
    /// Versions of the state that this version can convert.
    pub takes: Vec<u32>,
}

/// A migration of a session's state from one version of a function to another. `from` and `to` are the names of the
/// versions in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateMove {
    pub from: String,
    pub to: String,
    /// Name of the function whose state migrates.
    pub name: String,
}

/// The error that a function cannot continue with the state of its previous version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoStateMove {
    pub name: String,
    pub from: u32,
    pub to: u32,
}

/// Returns the migrations that a session needs to continue with another function list. Versions with the same layout of
/// state share the state (`alike`). A function that was not in the previous list starts without state.
pub fn moves(from: &[FunctionVersion], to: &[FunctionVersion]) -> Result<Vec<StateMove>, NoStateMove> {
    let mut moves = Vec::new();
    for new in to {
        // Only a function whose layout of state differs needs a migration.
        let Some(old) = from.iter().find(|old| old.name == new.name && old.state != new.state) else {
            continue;
        };
        if !new.takes.contains(&old.state) {
            return Err(NoStateMove { name: new.name.clone(), from: old.state, to: new.state });
        }
        moves.push(StateMove { from: old.key.clone(), to: new.key.clone(), name: new.name.clone() });
    }
    Ok(moves)
}

/// Returns the name in the kernel of a loaded version whose state has the same layout as that of a new version.
pub fn find_identical<'a>(loaded: &'a [FunctionVersion], new: &FunctionVersion) -> Option<&'a str> {
    let same = |old: &&FunctionVersion| old.name == new.name && old.state == new.state;
    loaded.iter().find(same).map(|old| old.key.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(name: &str, file: u32, state: u32, takes: &[u32]) -> FunctionVersion {
        FunctionVersion { name: name.into(), key: format!("{name}@{file}"), state, takes: takes.into() }
    }

    #[test]
    fn function_state_migrates_where_a_migration_exists() {
        let table = [
            (version("a", 1, 1, &[]), Ok(0)),
            // The second file of the same function has the same layout of state.
            (version("a", 2, 1, &[]), Ok(0)),
            (version("a", 3, 2, &[1]), Ok(1)),
            (version("a", 4, 3, &[2]), Err((1, 3))),
            // An older version cannot convert the state of a newer one.
            (version("a", 5, 0, &[]), Err((1, 0))),
            (version("b", 6, 7, &[]), Ok(0)),
        ];
        let old = [version("n", 1, 1, &[]), version("a", 1, 1, &[])];
        for (new, want) in table {
            let list = [old[0].clone(), new.clone()];
            let got = moves(&old, &list);
            let got = got.map(|moves| moves.len()).map_err(|no| (no.from, no.to));
            assert_eq!(got, want, "{new:?}");
        }
        let moved = moves(&old, &[version("a", 3, 2, &[1])]).expect("a way");
        assert_eq!(moved, [StateMove { from: "a@1".into(), to: "a@3".into(), name: "a".into() }]);
    }

    #[test]
    fn versions_with_the_same_state_layout_share_the_state() {
        let loaded = [version("a", 1, 1, &[]), version("b", 1, 2, &[]), version("a", 2, 2, &[1])];
        assert_eq!(find_identical(&loaded, &version("a", 3, 2, &[])), Some("a@2"));
        assert_eq!(find_identical(&loaded, &version("a", 4, 3, &[])), None);
        assert_eq!(find_identical(&loaded, &version("c", 1, 1, &[])), None);
    }
}
