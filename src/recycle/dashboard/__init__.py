"""A page about runs, from their records: `reading` follows records, `views` turns them into JSON, `web` serves both."""
