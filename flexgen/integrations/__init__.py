"""Where flexgen meets other projects: each module needs the project that it is named after."""
