//! Versions of a function, and how a session goes on from one to another.

/// A function of a list, as it was read from its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    pub name: String,
    /// What it is called in the kernel, where several versions may be at the same time.
    pub key: String,
    /// Of what it keeps of a session.
    pub state: u32,
    /// Versions of the state that it can make its own of.
    pub takes: Vec<u32>,
}

/// A state that is to be made out of another one: keys of functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    pub from: String,
    pub to: String,
    /// Of the function.
    pub name: String,
}

/// A function cannot go on with what the version before it knew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoWay {
    pub name: String,
    pub from: u32,
    pub to: u32,
}

/// What is to be moved for a session to go on from one list to another. Versions with the same state share it (`alike`), and what was not
/// in the list before has nothing to go on with.
pub fn moves(from: &[Version], to: &[Version]) -> Result<Vec<Move>, NoWay> {
    let mut moves = Vec::new();
    for new in to {
        let Some(old) = from.iter().find(|old| old.name == new.name && old.state != new.state) else {
            continue;
        };
        if !new.takes.contains(&old.state) {
            return Err(NoWay { name: new.name.clone(), from: old.state, to: new.state });
        }
        moves.push(Move { from: old.key.clone(), to: new.key.clone(), name: new.name.clone() });
    }
    Ok(moves)
}

/// Of those that are loaded, the one whose state a new one has, too.
pub fn alike<'a>(loaded: &'a [Version], new: &Version) -> Option<&'a str> {
    let same = |old: &&Version| old.name == new.name && old.state == new.state;
    loaded.iter().find(same).map(|old| old.key.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(name: &str, file: u32, state: u32, takes: &[u32]) -> Version {
        Version { name: name.into(), key: format!("{name}@{file}"), state, takes: takes.into() }
    }

    #[test]
    fn states_go_on_where_there_is_a_way() {
        let table = [
            (version("a", 1, 1, &[]), Ok(0)),
            // Another file with the same state.
            (version("a", 2, 1, &[]), Ok(0)),
            (version("a", 3, 2, &[1]), Ok(1)),
            (version("a", 4, 3, &[2]), Err((1, 3))),
            // Back again.
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
        assert_eq!(moved, [Move { from: "a@1".into(), to: "a@3".into(), name: "a".into() }]);
    }

    #[test]
    fn those_that_are_alike_share_their_state() {
        let loaded = [version("a", 1, 1, &[]), version("b", 1, 2, &[]), version("a", 2, 2, &[1])];
        assert_eq!(alike(&loaded, &version("a", 3, 2, &[])), Some("a@2"));
        assert_eq!(alike(&loaded, &version("a", 4, 3, &[])), None);
        assert_eq!(alike(&loaded, &version("c", 1, 1, &[])), None);
    }
}
