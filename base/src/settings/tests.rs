use serde::Deserialize;

use super::*;

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ListenerSetting {
    name: String,
    at: Vec<std::net::IpAddr>,
    #[serde(default)]
    port: u16,
    mode: Option<ModeSetting>,
    #[serde(default)]
    share: f64,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ModeSetting {
    Quick,
    VerySlow,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct SettingsFile {
    listener: Vec<ListenerSetting>,
    #[serde(default)]
    weights: BTreeMap<String, u32>,
}

fn problems(text: &str) -> String {
    let done = SettingsReader::file(text, "the file is", "f.toml", |_, file: SettingsFile| Some(file));
    done.map(|_| ()).unwrap_err().to_string()
}

#[test]
fn toml_settings_file_is_parsed_into_a_rust_struct() {
    let text = "weights = { a = 0x10 }\n[[listener]]\nname = \"a\"\nat = \"::1\"\nport = 7\nmode = \"very-slow\"\nshare = 1\n";
    let file =
        SettingsReader::file(text, "the file is", "f.toml", |_, file: SettingsFile| Some(file)).unwrap();
    let at = vec!["::1".parse().unwrap()];
    let listener =
        ListenerSetting { name: "a".into(), at, port: 7, mode: Some(ModeSetting::VerySlow), share: 1.0 };
    assert_eq!(file, SettingsFile { listener: vec![listener], weights: [("a".to_owned(), 16)].into() });
}

#[test]
fn toml_settings_problems_are_all_reported_with_line_and_key() {
    let text = "weigths = 1\n[weights]\na = -1\nb = 2\n[[listener]]\nat = 7\nport = 70000\nmode = \"slow\"\n[[listener]]\n\
        at = [\"::1\", \"nowhere\", true]\nprt = 1\nshare = \"much\"\n";
    let wanted = "the file is not usable:
  f.toml:1: weigths: unknown key; did you mean `weights`?
  f.toml:3: weights.a: is a number, 0 to 4294967295
  f.toml:5: listener[0].name: is missing
  f.toml:6: listener[0].at: is text in quotes, not a value of type integer
  f.toml:7: listener[0].port: is a number, 0 to 65535
  f.toml:8: listener[0].mode: is \"quick\" or \"very-slow\", not \"slow\"
  f.toml:9: listener[1].name: is missing
  f.toml:10: listener[1].at[1]: is an address, such as \"192.0.2.1\" or \"2001:db8::1\"
  f.toml:10: listener[1].at[2]: is text in quotes, not a value of type boolean
  f.toml:11: listener[1].prt: unknown key; did you mean `port`?
  f.toml:12: listener[1].share: is a number, not a value of type string";
    assert_eq!(problems(text), wanted);
}

#[test]
fn setting_of_the_wrong_type_is_reported_once() {
    assert_eq!(problems(""), "the file is not usable:\n  f.toml:1: listener: is missing");
    let table = problems("weights = 3\n[listener]\nname = \"a\"\n");
    assert!(table.contains("1: weights: is a table, not a value of type integer"), "{table}");
    assert!(table.contains("2: listener: each is a table of its own, written `[[listener]]`"), "{table}");
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(problems("listener = [\n").contains("f.toml:1: "));
}

#[test]
fn error_of_a_setting_check_is_reported_at_its_line() {
    let text = "\n[[listener]]\nname = \"a\"\nat = []\n[[listener]]\nname = \"b\"\nat = []\nport = 1\n";
    let check = |reader: &mut SettingsReader, file: SettingsFile| {
        reader.check("weights", Err::<(), _>("there are no weights"));
        reader.check("listener[1].port", Err::<(), _>("the port is taken"));
        reader.read_each("listener", file.listener, |it| Err::<(), _>(format!("{} has no address", it.name)))
    };
    let error = SettingsReader::file(text, "the file is", "f.toml", check).unwrap_err();
    let said: Vec<_> = error.problems.iter().map(|it| (it.line, it.message.as_str())).collect();
    let wanted = [
        (1, "there are no weights"),
        (2, "a has no address"),
        (5, "b has no address"),
        (8, "the port is taken"),
    ];
    assert_eq!(said, wanted);
}
