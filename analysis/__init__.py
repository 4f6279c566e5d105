"""From a sweep's folders to statements, figures and one report page. Reads files only; needs no torch."""
