//! Helpers for tests in crates with BPF programs: they read the names of enums, and load objects.

#![allow(clippy::expect_used, reason = "for tests")]

use std::os::fd::AsFd as _;
use std::path::Path;

use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::Enum;
use libbpf_rs::query::ProgInfoIter;
use libbpf_rs::{ObjectBuilder, Program};

/// Returns the names of an enum's values in lower case and without `prefix`, in the order of the values. The last one
/// is left out, because it is the number of values.
pub fn enum_names(out: &str, object: &str, kind: &str, prefix: &str) -> Vec<String> {
    let btf = btf(out, object);
    let kind: Enum<'_> = btf.type_by_name(kind).expect("an enum");
    let mut names: Vec<_> = kind
        .iter()
        .map(|member| (member.value, member.name.expect("a name").to_string_lossy().to_lowercase()))
        .collect();
    names.sort_unstable();
    assert!(names.pop().expect("a count").1.ends_with('s'));
    names.into_iter().map(|(_, name)| name.trim_start_matches(prefix).to_owned()).collect()
}

fn btf(out: &str, object: &str) -> Btf<'static> {
    Btf::from_path(format!("{out}/{object}")).expect("BTF")
}

/// Largest number of instructions that the verifier may process for a program. Linux allows a million, and older
/// kernels process more for the same program. A large number also slows down loading. If a program exceeds the limit,
/// make one of its static functions global: the verifier checks a global function once, and a static one at each call.
const MOST_VERIFIED: u32 = 400_000;

/// Loads objects, given as `(path, image)`, into the running kernel with their compiled-in configuration. Needs root.
pub fn load_objects(objects: &[(&str, &[u8])]) {
    assert!(!objects.is_empty());
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP load_objects: needs root");
        return;
    }
    for (path, image) in objects {
        let name = Path::new(path).file_name().and_then(|name| name.to_str()).expect("a name");
        // libelf needs an aligned image, and the memory of a `Vec` is aligned.
        let image = image.to_vec();
        let open = ObjectBuilder::default().open_memory(&image).expect(name);
        let object = open.load().expect(name);
        println!("{name}: {} programs, {} maps", object.progs().count(), object.maps().count());
        assert!(object.progs().count() > 0, "{name}");
        for program in object.progs() {
            // Programs that libbpf loads only on request were not loaded, so they have no ID.
            let Ok(id) = Program::id_from_fd(program.as_fd()) else { continue };
            let info = ProgInfoIter::default().find(|info| info.id == id).expect(name);
            println!("{name}: {:?}: {} instructions verified", program.name(), info.verified_insns);
            assert!(
                info.verified_insns <= MOST_VERIFIED,
                "{name}: {:?}: {}",
                program.name(),
                info.verified_insns
            );
        }
    }
}
