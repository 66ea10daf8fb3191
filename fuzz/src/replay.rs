//! For the crates' own tests: readers over their kept corpora.

/// A test that runs each of these readers (name and file) over what is kept for it.
macro_rules! replay {
    ($($name:ident: $path:literal,)*) => {
        $(
            #[path = $path]
            mod $name;
        )*

        #[test]
        fn every_kept_input_is_read_without_a_crash() {
            $(replay::each(stringify!($name), $name::FACTOR, $name::read);)*
        }
    };
}

/// `factor` bounds what a read may hold; only the fuzzers' allocator can see it.
pub fn each(name: &str, factor: usize, read: fn(&[u8])) {
    assert!(factor > 0, "{name} may hold nothing");
    let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fuzz/corpus")
        .join(name);
    let mut inputs = 0;
    for entry in std::fs::read_dir(&corpus).unwrap_or_else(|e| panic!("{}: {e}", corpus.display())) {
        let data = std::fs::read(entry.unwrap().path()).unwrap();
        read(&data);
        inputs += 1;
    }
    assert!(inputs > 0, "{} is empty", corpus.display());
}
