"""The programs. Each imports the language of kybernate, never another program."""
