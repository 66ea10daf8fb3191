#![no_main]

tandem_fuzz::target!(template);
