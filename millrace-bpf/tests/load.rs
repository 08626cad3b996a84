//! Every object that build.rs makes loads into the running kernel, with the configuration that it is compiled with.
//! Needs root.

use std::path::Path;

use libbpf_rs::ObjectBuilder;

const OBJECTS: &[(&str, &[u8])] = &include!(concat!(env!("OUT_DIR"), "/objects.rs"));

#[test]
fn every_object() {
    assert!(!OBJECTS.is_empty());
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP every_object: needs root");
        return;
    }
    for (path, image) in OBJECTS {
        let name = Path::new(path).file_name().and_then(|name| name.to_str()).expect("a name");
        // libelf wants it aligned, as a `Vec` is.
        let image = image.to_vec();
        let open = ObjectBuilder::default().open_memory(&image).expect(name);
        let object = open.load().expect(name);
        println!("{name}: {} programs, {} maps", object.progs().count(), object.maps().count());
        assert!(object.progs().count() > 0, "{name}");
    }
}
